# Test programs on the far device under three seeds: ctest -L far, or -L far_seed_1. Every program
# of rng, dtensor, ops and parallel runs there, but for those that are left out here with a reason.

# Programs that do not run there, and why.
function(far_not reason)
  foreach(program ${ARGN})
    set_property(GLOBAL APPEND PROPERTY far_left_out ${program})
    set_property(GLOBAL PROPERTY far_reason_${program} "${reason}")
  endforeach()
endfunction()
far_not("about single numbers in host memory: no tensor is on a device"
  rng_curand_oracle_test rng_device_draw_test rng_philox_test rng_planner_test rng_sampling_test
  rng_vectors_test)
far_not("about declarations and plans: nothing is moved" dtensor_factors_test
  dtensor_plan_scale_test)
far_not("the judge runs the CPU's kernels on parts in host memory" ops_mutate_test ops_verify_test)
far_not("about the instruction sets of the CPU" ops_levels_test)
far_not("about the CPU's allocator, one that fails at every place" parallel_allocations_test)
far_not("about text: there is no tensor" parallel_text_test)
far_not("about worlds of any size on meta" parallel_big_world_test)
far_not("compares the CPU and the far device by itself" ops_far_bits_test parallel_far_suite_test)

# Tests of the programs above that do not run there.
# The error word of a device has no room for the inputs' specs, and is read later.
set(far_without_dtensor_dispatch_test DispatchTest.ErrorsNameOpSpecsAndRank)
# An error that a kernel finds is told where the host waits, not by the call: peers do not learn it
# at once, and a handler around the call does not see it. (far_device_test has what is told, and when.)
set(far_without_parallel_rank_local_test RankLocalErrors.PeersLearnTheCulpritAtOnce
  RankLocalErrors.OfLocalTensorsStayLocalWhileTheyAreCaught RankLocalErrors.DispatchReturnsThem)
# Rank 0 queues the moves of all: there are no spans of the others.
set(far_without_parallel_timeline_test Timeline.AStepOnAllRanks)

# Those of very many cases try fewer.
set(far_environment_ops_programs_test DT_PROGRAMS=60)
set(far_environment_dtensor_pending_programs_test DT_PENDING_PROGRAMS=100)
foreach(program dtensor_redistribute_bytes_test ops_pending_gradients_test ops_torch_samples_test
    rng_sharding_test)
  set(far_environment_${program} DT_THIN=1)
endforeach()
# Each seed runs a third of its tests.
set(far_thirds dtensor_between_meshes_test ops_attention_test ops_cases_test ops_conv_test
  ops_einsum_test ops_explain_run_test ops_known_bugs_test ops_loss_test ops_matmul_test
  ops_norm_test ops_pointwise_test ops_torch_samples_test parallel_generate_test
  parallel_hf_files_test parallel_hf_golden_test parallel_hf_variants_test parallel_sample_test
  parallel_train_parts_test parallel_train_resume_test rng_sharding_test)
set(far_environment_parallel_generate_test DT_THIN=1)
set(far_environment_ops_laws_test RC_PARAMS=max_success=30)

get_property(far_left_out GLOBAL PROPERTY far_left_out)
foreach(folder rng dtensor ops parallel)
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*_test.cc)
  foreach(source ${sources})
    get_filename_component(name ${source} NAME_WE)
    set(program ${folder}_${name})
    if(program IN_LIST far_left_out)
      get_property(reason GLOBAL PROPERTY far_reason_${program})
      message(STATUS "not on the far device: ${program}: ${reason}")
      continue()
    endif()
    string(REPLACE ";" ":" without "${far_without_${program}}")
    foreach(seed 0 1 2)
      set(environment DTENSOR_DEVICE=far DTENSOR_FAR_SEED=${seed} ${far_environment_${program}})
      if(program IN_LIST far_thirds)
        list(APPEND environment GTEST_TOTAL_SHARDS=3 GTEST_SHARD_INDEX=${seed})
      endif()
      add_test(NAME far_${program}_${seed} COMMAND ${CMAKE_CURRENT_BINARY_DIR}/${program}
        --gtest_filter=-${without})
      set_tests_properties(far_${program}_${seed} PROPERTIES LABELS "far;far_seed_${seed}"
        TIMEOUT ${timeout} ENVIRONMENT "${environment}")
    endforeach()
  endforeach()
endforeach()
# It compares the two devices' bits by itself, under seed 1 where it stands among the tests above.
foreach(seed 0 2)
  add_test(NAME far_ops_far_bits_test_${seed} COMMAND ${CMAKE_CURRENT_BINARY_DIR}/ops_far_bits_test)
  set_tests_properties(far_ops_far_bits_test_${seed} PROPERTIES LABELS "far;far_seed_${seed}"
    TIMEOUT ${timeout} ENVIRONMENT DTENSOR_FAR_SEED=${seed})
endforeach()
