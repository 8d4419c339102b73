# Faults of a training's numbers and logs: on threads, and on processes where there are some.
if(NOT TARGET dtensor_parallel)
  return()
endif()
add_executable(processes_training processes/training.cc)
target_link_libraries(processes_training PRIVATE dtensor_parallel)
target_include_directories(processes_training PRIVATE ${PROJECT_SOURCE_DIR})
add_executable(processes_training_faults_test processes/training_faults_test.cc)
target_link_libraries(processes_training_faults_test PRIVATE GTest::gmock GTest::gtest_main
  absl::strings)
target_precompile_headers(processes_training_faults_test REUSE_FROM precompiled)
target_include_directories(processes_training_faults_test PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_definitions(processes_training_faults_test PRIVATE
  DT_TRAINING="$<TARGET_FILE:processes_training>"
  $<$<BOOL:${has_mpi}>:DT_MPIRUN="${MPIEXEC_EXECUTABLE}">)
if(has_gloo)
  target_compile_definitions(processes_training_faults_test PRIVATE
    DT_RUN="$<TARGET_FILE:dtensor-run>")
  add_dependencies(processes_training_faults_test dtensor-run)
endif()
add_dependencies(processes_training_faults_test processes_training)
add_test(NAME processes_training_faults_test COMMAND processes_training_faults_test)
set_tests_properties(processes_training_faults_test PROPERTIES LABELS processes TIMEOUT ${timeout}
  ENVIRONMENT "${mpi_environment}")
# Hosts are network namespaces: where this machine lets tests make them.
if(has_gloo)
  add_test(NAME processes_hosts COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/processes/hosts.py
    $<TARGET_FILE:dtensor-run> $<TARGET_FILE:processes_training> $<TARGET_FILE:calibrate>)
  set_tests_properties(processes_hosts PROPERTIES LABELS processes TIMEOUT ${timeout}
    SKIP_RETURN_CODE 77)
endif()
