# Programs that are the same on processes as on threads, and faults of processes, by every launcher
# that there is.
if(NOT (has_mpi OR has_gloo) OR NOT TARGET dtensor_parallel)
  return()
endif()
add_executable(processes_launched_test processes/launched_test.cc)
target_link_libraries(processes_launched_test PRIVATE dtensor_parallel GTest::gmock
  GTest::gtest_main nlohmann_json::nlohmann_json)
target_precompile_headers(processes_launched_test REUSE_FROM precompiled)
target_include_directories(processes_launched_test PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_definitions(processes_launched_test PRIVATE
  DT_PROGRAM="$<TARGET_FILE:processes_program>" DT_TEST_DATA="${CMAKE_CURRENT_SOURCE_DIR}/data"
  $<$<BOOL:${has_mpi}>:DT_MPIRUN="${MPIEXEC_EXECUTABLE}">)
add_dependencies(processes_launched_test processes_program)
if(has_gloo)
  target_compile_definitions(processes_launched_test PRIVATE DT_RUN="$<TARGET_FILE:dtensor-run>")
  add_dependencies(processes_launched_test dtensor-run)
endif()
if(TARGET train_gpt)
  target_compile_definitions(processes_launched_test PRIVATE
    DT_TRAIN_GPT="$<TARGET_FILE:train_gpt>" DT_GENERATE="$<TARGET_FILE:generate>")
  add_dependencies(processes_launched_test train_gpt generate)
endif()
add_executable(processes_faults_test processes/faults_test.cc)
target_link_libraries(processes_faults_test PRIVATE dtensor_mesh GTest::gmock GTest::gtest_main)
target_precompile_headers(processes_faults_test REUSE_FROM precompiled)
target_include_directories(processes_faults_test PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_definitions(processes_faults_test PRIVATE
  DT_PROGRAM="$<TARGET_FILE:processes_program>"
  $<$<BOOL:${has_mpi}>:DT_MPIRUN="${MPIEXEC_EXECUTABLE}">
  $<$<BOOL:${has_gloo}>:DT_RUN="$<TARGET_FILE:dtensor-run>">)
add_dependencies(processes_faults_test processes_program)
if(has_gloo)
  add_library(hangs MODULE processes/hangs.cc)
  target_compile_definitions(processes_faults_test PRIVATE DT_HANGS="$<TARGET_FILE:hangs>")
  add_dependencies(processes_faults_test hangs)
endif()
if(has_mpi)
  add_executable(processes_own_mpi processes/own_mpi.cc)
  target_link_libraries(processes_own_mpi PRIVATE dtensor_mesh MPI::MPI_C)
  target_include_directories(processes_own_mpi PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(processes_launched_test PRIVATE
    DT_OWN_MPI="$<TARGET_FILE:processes_own_mpi>")
  add_dependencies(processes_launched_test processes_own_mpi)
endif()
foreach(test launched faults)
  add_test(NAME processes_${test}_test COMMAND processes_${test}_test)
  set_tests_properties(processes_${test}_test PROPERTIES LABELS processes TIMEOUT ${timeout}
    ENVIRONMENT "${mpi_environment}")
endforeach()
