# Ranks that are processes, under mpirun and under dtensor-run: the conformance suite, faults, and a
# training that has the losses of threads. Not under sanitizers, to which MPI itself is a leak.
find_package(MPI COMPONENTS C)
set(has_mpi FALSE)
if(MPI_C_FOUND AND MPIEXEC_EXECUTABLE AND NOT DT_SANITIZE)
  set(has_mpi TRUE)
endif()
set(has_gloo FALSE)
if(TARGET dtensor_gloo AND TARGET dtensor-run AND NOT DT_SANITIZE)
  set(has_gloo TRUE)
endif()
if(has_mpi OR has_gloo)
  add_executable(processes_conformance processes/conformance_main.cc)
  target_link_libraries(processes_conformance PRIVATE test_conformance)
  add_executable(processes_program processes/program.cc)
  foreach(target processes_conformance processes_program)
    target_link_libraries(${target} PRIVATE dtensor_mesh GTest::gmock)
    target_precompile_headers(${target} REUSE_FROM precompiled)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  endforeach()
endif()
# As many as are asked for, on however few cores; as root too, as in a container.
set(mpi_environment OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
  PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
  PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe)
# Tests of the engine that also run on processes (processes/suite).
set(process_suites dtensor_redistribute_test dtensor_between_meshes_test
  dtensor_pending_programs_test dtensor_autograd_test dtensor_async_test parallel_plan_test
  parallel_optim_test parallel_pipeline_test parallel_spmd_training_test rng_state_test
  ops_random_test)
# What compares what several ranks were told.
set(of_threads -*.HistoriesMayLiveInStatics:*.DisagreementsNameBothSides)
# A process runs every test; those of more ranks than there are are left out.
set(ranks_2 "*/Processes1:*/Processes2")
set(ranks_4 "*/Processes3:*/Processes4")
set(ranks_8 "*/Processes5:*/Processes8")
include(processes/dtensor_run.cmake)
include(processes/training_faults.cmake)
include(processes/launched.cmake)
if(NOT has_mpi)
  add_test(NAME processes COMMAND ${CMAKE_COMMAND} -E echo
    "skipped: no mpirun (apt: openmpi-bin libopenmpi-dev), or a sanitizer")
  set_tests_properties(processes PROPERTIES LABELS processes SKIP_REGULAR_EXPRESSION "^skipped")
  return()
endif()
add_executable(processes_test processes/processes_test.cc)
target_link_libraries(processes_test PRIVATE dtensor_mesh GTest::gmock GTest::gtest_main
  nlohmann_json::nlohmann_json)
target_include_directories(processes_test PRIVATE ${PROJECT_SOURCE_DIR})
target_precompile_headers(processes_test REUSE_FROM precompiled)
target_compile_definitions(processes_test PRIVATE DT_MPIRUN="${MPIEXEC_EXECUTABLE}"
  DT_PROGRAM="$<TARGET_FILE:processes_program>")
add_dependencies(processes_test processes_program)
add_library(foreign_messages MODULE processes/foreign_messages.cc)
target_include_directories(foreign_messages PRIVATE ${DT_INCLUDE})
target_compile_definitions(processes_test PRIVATE DT_FOREIGN="$<TARGET_FILE:foreign_messages>")
add_dependencies(processes_test foreign_messages)
if(TARGET train_gpt)
  target_compile_definitions(processes_test PRIVATE DT_TRAIN_GPT="$<TARGET_FILE:train_gpt>")
  add_dependencies(processes_test train_gpt)
endif()
if(TARGET train_llama)
  target_compile_definitions(processes_test PRIVATE DT_TRAIN_LLAMA="$<TARGET_FILE:train_llama>")
  add_dependencies(processes_test train_llama)
endif()
add_test(NAME processes_test COMMAND processes_test)
set(processes_tests processes_test)
foreach(n 2 4 8)
  add_test(NAME processes_conformance_${n} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG}
    ${n} $<TARGET_FILE:processes_conformance> --gtest_brief=1 --gtest_filter=${ranks_${n}})
  list(APPEND processes_tests processes_conformance_${n})
endforeach()
# As on two nodes, between which all is worth sending once.
set(slow_links ${CMAKE_CURRENT_BINARY_DIR}/slow_links.json)
file(WRITE ${slow_links} [[{"intra_node.latency_us": 1, "intra_node.bytes_per_us": 1000,
  "inter_node.latency_us": 0.001, "inter_node.bytes_per_us": 0.001, "ranks_per_node": 2}]])
set(of_nodes $<TARGET_FILE:processes_conformance> --gtest_brief=1
  --gtest_filter=*/Processes4:*/Processes5)
add_test(NAME processes_conformance_nodes COMMAND ${MPIEXEC_EXECUTABLE}
  ${MPIEXEC_NUMPROC_FLAG} 3 ${CMAKE_COMMAND} -E env DTENSOR_COST_MODEL=${slow_links}
  DTENSOR_NODE=a ${of_nodes} :
  ${MPIEXEC_NUMPROC_FLAG} 2 ${CMAKE_COMMAND} -E env DTENSOR_NODE=b ${of_nodes})
list(APPEND processes_tests processes_conformance_nodes)
find_program(MPICH_EXEC NAMES mpiexec.mpich mpiexec.hydra HINTS ${MPICH_ROOT}/bin)
if(TARGET dtensor_mpich AND MPICH_EXEC)
  foreach(n 2 4)
    add_test(NAME processes_mpich_conformance_${n} COMMAND ${MPICH_EXEC} -n ${n}
      $<TARGET_FILE:processes_conformance> --gtest_brief=1 --gtest_filter=${ranks_${n}})
    list(APPEND processes_tests processes_mpich_conformance_${n})
  endforeach()
endif()
# A program that knows nothing of processes.
if(TARGET quickstart)
  add_test(NAME processes_quickstart COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} 4
    $<TARGET_FILE:quickstart>)
  set_tests_properties(processes_quickstart PROPERTIES
    PASS_REGULAR_EXPRESSION "7\\.3804 float32 \\[16, 32\\] on dp=2 tp=2 \\[R, S\\(1\\)\\]")
  list(APPEND processes_tests processes_quickstart)
endif()
# What the engine promises, on processes. Not tests of what a forked program does.
foreach(suite ${process_suites})
  foreach(n 2 4)
    add_test(NAME processes_${suite}_${n} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/processes/suite
      ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${n} ${CMAKE_CURRENT_BINARY_DIR}/${suite}
      ${of_threads})
    list(APPEND processes_tests processes_${suite}_${n})
  endforeach()
endforeach()
set_tests_properties(${processes_tests} PROPERTIES LABELS processes TIMEOUT ${timeout}
  ENVIRONMENT "${mpi_environment}")
