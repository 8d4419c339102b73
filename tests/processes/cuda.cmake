# Ranks that are processes with a GPU each, by NCCL, on its stand-in: the conformance suite with all
# calls compared and not, a training, steps as graphs, and what is said of a process that dies.
if(NOT has_gloo)
  add_test(NAME processes_cuda COMMAND ${CMAKE_COMMAND} -E echo
    "skipped: no gloo (apt: libgloo-dev), or no examples")
  set_tests_properties(processes_cuda PROPERTIES LABELS "gpu;processes"
    SKIP_REGULAR_EXPRESSION "^skipped")
  return()
endif()
set(processes_environment "DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};DT_CUSIM_STRICT=1"
  "LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib" ${mpi_environment})
add_dependencies(processes_conformance cusim_nccl dtensor_cuda)
# cuda_conformance(way filter environment launcher...)
function(cuda_conformance way filter environment)
  add_test(NAME processes_cuda_conformance_${way} COMMAND ${ARGN}
    $<TARGET_FILE:processes_conformance> --gtest_brief=1 --gtest_filter=${filter})
  set_tests_properties(processes_cuda_conformance_${way} PROPERTIES LABELS "gpu;processes"
    TIMEOUT ${timeout} FAIL_REGULAR_EXPRESSION "cusim: "
    ENVIRONMENT "${processes_environment};DT_TEST_DEVICE=cuda;${environment}")
endfunction()
cuda_conformance(each ${ranks_2} "DTENSOR_CHECK=each;DT_CUSIM_DEVICES=2"
  $<TARGET_FILE:dtensor-run> --nproc-per-node 2 --)
if(has_mpi)  # without what is told where the host waits for its device: cuda_nccl_test
  cuda_conformance(mpi
    ${ranks_4}-*Mismatch.*Overlapped*:*Fault.A*Rank*:*Fault.AnAbort*:*AGroupMayHave*
    "DT_CUSIM_DEVICES=4" ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} 4)
endif()
add_executable(processes_graphed processes/graphed.cc)
target_link_libraries(processes_graphed PRIVATE dtensor_parallel)
add_executable(processes_cuda_test processes/cuda_test.cc)
target_link_libraries(processes_cuda_test PRIVATE GTest::gmock GTest::gtest_main absl::strings)
target_precompile_headers(processes_cuda_test REUSE_FROM precompiled)
target_include_directories(processes_cuda_test PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_definitions(processes_cuda_test PRIVATE DT_RUN="$<TARGET_FILE:dtensor-run>"
  DT_PROGRAM="$<TARGET_FILE:processes_program>" DT_TRAINING="$<TARGET_FILE:processes_training>"
  DT_GRAPHED="$<TARGET_FILE:processes_graphed>")
add_dependencies(processes_cuda_test dtensor-run processes_program processes_training
  processes_graphed cusim_nccl dtensor_cuda)
add_test(NAME processes_cuda_test COMMAND processes_cuda_test)
set_tests_properties(processes_cuda_test PROPERTIES LABELS "gpu;processes" TIMEOUT ${timeout}
  ENVIRONMENT "${processes_environment}")
