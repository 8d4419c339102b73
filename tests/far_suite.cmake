# Test programs that run on the far device as well, and the tests of them that do not, with reasons.
set(far_programs
  dtensor_autograd_test dtensor_dispatch_test dtensor_redistribute_test ops_embedding_test
  ops_index_test ops_loss_test ops_matmul_test ops_norm_test ops_random_test ops_reduce_test
  ops_segmented_test ops_softmax_test ops_view_test parallel_fused_attention_test
  parallel_gradients_test parallel_module_test parallel_optim_test parallel_plan_test parallel_rehearsal_test
  parallel_spmd_training_test rng_state_test)
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
