# Test programs on the CUDA device, on the stand-in for its runtime (tests/cusim): ctest -L gpu. What
# has run there was executed instruction by instruction, never on a GPU.
if(NOT DT_CUDA_PLUGIN OR NOT TARGET cusim_cudart)
  message(STATUS "not on cuda: all test programs: no plugin was built")
  return()
endif()

# cuda_test(program filter environment...): one run per schedule seed, with no report of any kind.
# In CI (DT_PART) one seed runs, another with every commit.
function(cuda_test program filter)
  foreach(seed 0 1)
    set(name gpu_${program}_${seed})
    add_test(NAME ${name} COMMAND ${program} --gtest_filter=${filter})
    set_tests_properties(${name} PROPERTIES LABELS gpu TIMEOUT ${timeout}
      FAIL_REGULAR_EXPRESSION "cusim: "
      ENVIRONMENT "DTENSOR_DEVICE=cuda;DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};DT_CUSIM_SEED=${seed};\
DT_CUSIM_STRICT=1;LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib;${ARGN}")
    add_dependencies(${program} dtensor_cuda cusim_cudart)
  endforeach()
endfunction()

cuda_test(ops_far_bits_test * DT_THIN=1)
cuda_test(parallel_far_suite_test FarSuite.AnIntegerModelHasTheBitsOfTheCpu)
