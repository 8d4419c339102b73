# Test programs on the far device under three seeds: ctest -L far. Every program of rng, dtensor,
# ops and parallel stands in one of the two lists.
set(far_programs
  dtensor_async_test dtensor_autograd_test dtensor_between_meshes_test dtensor_dispatch_test
  dtensor_pending_programs_test dtensor_redistribute_bytes_test dtensor_redistribute_test
  dtensor_user_rules_test
  ops_arguments_test ops_attention_test ops_cases_test ops_corner_cases_test
  ops_edge_gradients_test
  ops_embedding_test ops_explain_run_test ops_explain_test ops_index_test ops_indexing_test
  ops_laws_test ops_loss_test ops_matmul_test ops_norm_test ops_optim_test
  ops_pending_extremes_test ops_pending_gradients_test ops_pointwise_test ops_programs_test
  ops_random_test ops_recompute_test ops_reduce_test ops_segmented_test ops_softmax_test
  ops_torch_samples_test ops_user_errors_test ops_view_test ops_view_writes_test
  parallel_comm_trace_test parallel_explain_test parallel_fused_attention_test
  parallel_gradients_test parallel_init_test parallel_memory_test parallel_module_parts_test
  parallel_module_test parallel_optim_state_test parallel_optim_test parallel_ownership_test
  parallel_plan_test parallel_rank_local_test parallel_rehearsal_test parallel_spmd_training_test
  parallel_step_faults_test parallel_tie_test parallel_timeline_test parallel_warnings_test
  rng_sharding_test rng_state_test rng_tracker_test)

# Programs that do not run there, and why.
function(far_not reason)
  foreach(program ${ARGN})
    set_property(GLOBAL APPEND PROPERTY far_left_out ${program})
    set_property(GLOBAL PROPERTY far_reason_${program} "${reason}")
  endforeach()
endfunction()
far_not("about single numbers in host memory: no tensor is on a device"
  rng_curand_oracle_test rng_device_draw_test rng_philox_test rng_planner_test rng_vectors_test)
far_not("about declarations and plans: nothing is moved" dtensor_factors_test
  dtensor_plan_scale_test)
far_not("the judge runs the CPU's kernels on parts in host memory" ops_mutate_test ops_verify_test)
far_not("about the instruction sets of the CPU" ops_levels_test)
far_not("about the CPU's allocator, one that fails at every place" parallel_allocations_test)
far_not("about worlds of any size on meta" parallel_big_world_test)
far_not("compares the CPU and the far device by itself" ops_far_bits_test parallel_far_suite_test)

# Tests of the programs above that do not run there.
# The error word of a device has no room for the inputs' specs, and is read later.
set(far_without_dtensor_dispatch_test DispatchTest.ErrorsNameOpSpecsAndRank)
# The culprit's kernel finds the error and it never waits: it does not know.
set(far_without_parallel_rank_local_test RankLocalErrors.PeersLearnTheCulpritAtOnce)
# Rank 0 queues the moves of all: there are no spans of the others.
set(far_without_parallel_timeline_test Timeline.AStepOnAllRanks)

# Those of very many cases try fewer.
set(far_environment_ops_programs_test DT_PROGRAMS=60)
foreach(program dtensor_redistribute_bytes_test ops_torch_samples_test rng_sharding_test)
  set(far_environment_${program} DT_THIN=1)
endforeach()
# Each seed runs a third of its tests.
set(far_thirds dtensor_between_meshes_test ops_attention_test ops_pointwise_test)
set(far_environment_ops_laws_test RC_PARAMS=max_success=30)

foreach(program ${far_programs})
  if(NOT TARGET ${program})
    continue()
  endif()
  string(REPLACE ";" ":" without "${far_without_${program}}")
  foreach(seed 0 1 2)
    set(environment DTENSOR_DEVICE=far DTENSOR_FAR_SEED=${seed} ${far_environment_${program}})
    if(program IN_LIST far_thirds)
      list(APPEND environment GTEST_TOTAL_SHARDS=3 GTEST_SHARD_INDEX=${seed})
    endif()
    add_test(NAME far_${program}_${seed} COMMAND ${program} --gtest_filter=-${without})
    set_tests_properties(far_${program}_${seed} PROPERTIES LABELS far TIMEOUT ${timeout}
      ENVIRONMENT "${environment}")
  endforeach()
endforeach()

# What is left out is said, and nothing is forgotten.
get_property(far_left_out GLOBAL PROPERTY far_left_out)
foreach(folder rng dtensor ops parallel)
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*_test.cc)
  foreach(source ${sources})
    get_filename_component(name ${source} NAME_WE)
    set(program ${folder}_${name})
    if(program IN_LIST far_left_out)
      get_property(reason GLOBAL PROPERTY far_reason_${program})
      message(STATUS "not on the far device: ${program}: ${reason}")
    elseif(NOT program IN_LIST far_programs)
      message(FATAL_ERROR "${program} is in no list of tests/far_suite.cmake: add it to "
        "far_programs, or to far_not with the reason")
    endif()
  endforeach()
endforeach()
