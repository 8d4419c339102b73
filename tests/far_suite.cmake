# Test programs that run on the far device as well, and the tests of them that do not, with reasons.
set(far_programs
  dtensor_autograd_test dtensor_dispatch_test ops_norm_test ops_random_test parallel_optim_test)
# Errors of kernels are told later there, without the inputs' specs.
set(far_without_dtensor_dispatch_test DispatchTest.ErrorsNameOpSpecsAndRank)
foreach(program ${far_programs})
  if(NOT TARGET ${program})
    continue()
  endif()
  string(REPLACE ";" ":" without "${far_without_${program}}")
  add_test(NAME far_${program} COMMAND ${program} --gtest_filter=-${without})
  set_tests_properties(far_${program} PROPERTIES LABELS far TIMEOUT ${timeout}
    ENVIRONMENT DTENSOR_DEVICE=far)
endforeach()
