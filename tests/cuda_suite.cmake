# Test programs on the CUDA device, on the stand-in for its runtime (tests/cusim): ctest -L gpu.
# scripts/gpu_bundle takes these to a machine with a GPU.
if(NOT DT_CUDA_PLUGIN OR NOT TARGET cusim_cudart)
  message(STATUS "not on cuda: all test programs: no plugin was built")
  return()
endif()

# cuda_test_as(name program filter environment...): with no report of any kind, memory that nobody
# freed at the end among them. The schedule is that of DT_CUSIM_SEED where ctest runs: of all tests
# here another one with each commit in CI, 0 to 4 in ./dev gpu.
function(cuda_test_as test program filter)
  set(name gpu_${test})
  add_test(NAME ${name} COMMAND ${CMAKE_CURRENT_BINARY_DIR}/${program} --gtest_filter=${filter})
  set_tests_properties(${name} PROPERTIES LABELS gpu TIMEOUT 3600  # with no case left out
    FAIL_REGULAR_EXPRESSION "cusim: "
    ENVIRONMENT "DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};DT_CUSIM_STRICT=1;DT_CUSIM_LEAKS=1;\
LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib;${ARGN}")
endfunction()
# The same where one run is long: in two halves, beside each other.
function(cuda_test_halves test program filter)
  foreach(half 0 1)
    cuda_test_as(${test}_${half} ${program} ${filter} GTEST_TOTAL_SHARDS=2
      GTEST_SHARD_INDEX=${half} ${ARGN})
  endforeach()
endfunction()
# cuda_test(program filter environment...): of the program's name.
function(cuda_test program filter)
  cuda_test_as(${program} ${program} ${filter} ${ARGN})
endfunction()

# Every op against the CPU, in float64 and in fewer bits, an eighth of them in CI; by kernels of ours
# alone, whose bits are known.
cuda_test(ops_far_bits_test * DT_TEST_DEVICE=cuda DTENSOR_CUDA_BLAS=own DT_THIN=1)
# Products by cuBLASLt, and what stands behind them.
cuda_test_as(linear_activation ops_matmul_test LinearActivation.*-*.Sharded DTENSOR_DEVICE=cuda)
cuda_test_as(linear_activation_own ops_matmul_test LinearActivation.IsTheTwoOps DTENSOR_DEVICE=cuda
  DTENSOR_CUDA_BLAS=own)
cuda_test_as(products ops_far_bits_test FarBits.Products* DT_TEST_DEVICE=cuda)
# PyTorch's values and gradients on one rank.
cuda_test(ops_torch_samples_test * DTENSOR_DEVICE=cuda DT_ONE_RANK=1)
# The GPT's training on 1 and on 2 x 2 ranks, a model of whole numbers, random numbers, bad data.
cuda_test(parallel_far_suite_test * DT_TEST_DEVICE=cuda)
# The same by NCCL: a device for each rank.
cuda_test_as(nccl_parallel_far_suite_test parallel_far_suite_test * DT_TEST_DEVICE=cuda
  DT_CUSIM_DEVICES=4)
# Pipelines: what goes between stages, and numbers; by NCCL with a device for each rank.
cuda_test(parallel_pipeline_test Pipeline.SendsWhatItMust:Pipeline.Evaluates DTENSOR_DEVICE=cuda)
cuda_test_as(nccl_pipeline parallel_pipeline_test Pipeline.SendsWhatItMust:Pipeline.Evaluates
  DTENSOR_DEVICE=cuda DT_CUSIM_DEVICES=4)

# Dropout, in one pass there.
cuda_test_as(dropout ops_random_test Dropout.*:RandomOps.AreOneDevicesUnderAnyPlacement
  DTENSOR_DEVICE=cuda)

# Lists in one launch; steps as graphs, with NCCL's collectives too.
cuda_test(ops_call_list_test * DT_TEST_DEVICE=cuda)
cuda_test(parallel_graphed_step_test *-*FailsAlone* DT_TEST_DEVICE=cuda DTENSOR_CUDA_BLAS=own)
cuda_test_as(nccl_graphed_step parallel_graphed_step_test *WithADeviceEach:*DoesNotLaunch
  DT_TEST_DEVICE=cuda DTENSOR_CUDA_BLAS=own DT_CUSIM_DEVICES=4)
# A rank that is gone in the middle of a capture joins nothing any more, which the stand-in reports.
add_test(NAME gpu_graphed_step_fails
  COMMAND parallel_graphed_step_test --gtest_filter=*FailsAlone*)
set_tests_properties(gpu_graphed_step_fails PROPERTIES LABELS gpu TIMEOUT ${timeout}
  PASS_REGULAR_EXPRESSION "PASSED  . 1 test"
  ENVIRONMENT "DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};DT_TEST_DEVICE=cuda;\
LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib")
function(cuda_program name passes)  # command
  add_test(NAME gpu_${name} COMMAND ${ARGN})
  set_tests_properties(gpu_${name} PROPERTIES LABELS gpu TIMEOUT ${timeout}
    PASS_REGULAR_EXPRESSION "${passes}" FAIL_REGULAR_EXPRESSION "cusim: |error: "
    ENVIRONMENT "DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};DT_CUSIM_STRICT=1;\
LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib")
endfunction()
if(TARGET graphed_step)
  cuda_program(graphed_step "step 5.*the same losses" graphed_step --device=cuda)
endif()
if(TARGET train_gpt)
  # The loss that the CPU has.
  cuda_program(train_gpt "step 1/1  loss 5\\.5554.*peak bytes per rank: 261" train_gpt --device=cuda
    --mesh tp=2 --steps 1 --layers 1 --hidden 32 --seq 16 --batch 4)
  # And the stand-in knows every instruction of the plugin, those that no test runs included.
  set_property(TEST gpu_train_gpt APPEND PROPERTY ENVIRONMENT DT_CUSIM_WHOLE=1)
endif()
# What kernels and steps launch, move and wait for, against tests/data/cuda_counts.txt; and steps in
# which any one allocation fails, an eighth of them in CI.
foreach(name counts allocations kept_launch floor)
  add_executable(cuda_${name}_test cuda/${name}_test.cc)
  target_link_libraries(cuda_${name}_test PRIVATE dtensor_parallel GTest::gtest test_main
    ${CMAKE_DL_LIBS})
  target_precompile_headers(cuda_${name}_test REUSE_FROM precompiled)
  target_include_directories(cuda_${name}_test PRIVATE ${PROJECT_SOURCE_DIR})
endforeach()
target_compile_definitions(cuda_counts_test PRIVATE DT_TEST_DATA="${CMAKE_CURRENT_SOURCE_DIR}/data")
# Pointwise calls whose plan holds the launch.
cuda_test(cuda_kept_launch_test * DTENSOR_CUDA_BLAS=own)
cuda_test(cuda_floor_test *-*TheDeviceOfTheThread*)
cuda_test_as(cuda_floor_devices cuda_floor_test *TheDeviceOfTheThread* DT_CUSIM_DEVICES=2)
cuda_test_as(cuda_floor_flush cuda_floor_test *FreeMemoryGoesBack* DT_CUSIM_MEMORY=88080384)
cuda_test(cuda_counts_test * DTENSOR_CUDA_BLAS=own DT_CUSIM_RACES=0)
cuda_test_as(activations cuda_counts_test CudaCounts.AnActivationIsPartOfTheProduct)
cuda_test(cuda_allocations_test * DT_THIN=1)
cuda_test_as(nccl_allocations cuda_allocations_test *OfOneRank* DT_THIN=1 DT_CUSIM_DEVICES=2)
# Known random numbers, drawn there: tensors that would take long only where an answer is known.
if(TARGET rng_check)
  function(gpu_rng_check name)  # name, arguments of rng_check
    add_test(NAME gpu_${name} COMMAND rng_check --whole=20000 ${ARGN})
    set_tests_properties(gpu_${name} PROPERTIES LABELS gpu TIMEOUT ${timeout}
      PASS_REGULAR_EXPRESSION "^[1-9][0-9]+ passed, 0 failed" FAIL_REGULAR_EXPRESSION "cusim: "
      ENVIRONMENT "DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};DT_CUSIM_STRICT=1;DTENSOR_DEVICE=cuda;\
LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib")
  endfunction()
  file(GLOB vectors ${CMAKE_CURRENT_SOURCE_DIR}/data/rng-vectors*.json)
  foreach(file ${vectors})
    get_filename_component(name ${file} NAME_WE)
    string(REPLACE "rng-vectors" "rng_check" name ${name})
    gpu_rng_check(${name} ${file})
  endforeach()
  gpu_rng_check(rng_check_hardware_math --hardware-math ${vectors})
  foreach(ranks 2 3 4)  # that share the device
    gpu_rng_check(rng_check_on_${ranks} --ranks=${ranks} ${vectors})
  endforeach()
endif()

# What ptxas makes of kernels, against tests/data/cuda_kernels.txt: of this build, sm_80 alone, and not
# the files that have most of the code.
if(NOT DT_CUDA_ARCHS)
  get_filename_component(cuda_bin ${DT_NVCC} DIRECTORY)
  set(files activations arrays attention attention_mma device embedding gather grid_sample loss
    matmul norm optim pointwise random resample scan softmax sort unique windows)
  list(JOIN files "," files)
  add_test(NAME gpu_kernel_report COMMAND python3 ${PROJECT_SOURCE_DIR}/scripts/cuda_report
    --build ${CMAKE_BINARY_DIR} --ptxas ${cuda_bin}/ptxas --compiler ${CMAKE_CXX_COMPILER} --archs 80
    --check --files ${files})
  set_tests_properties(gpu_kernel_report PROPERTIES LABELS gpu TIMEOUT ${timeout})
endif()

# What the bundle of ./dev gpu-bundle says of machines that cannot run it.
add_library(cuda_fake_driver SHARED cuda/fake_driver.cc)
set_target_properties(cuda_fake_driver PROPERTIES OUTPUT_NAME cuda SOVERSION 1
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/fake_driver)
function(bundle_refusal name environment expected)
  add_test(NAME gpu_bundle_${name} COMMAND python3 ${PROJECT_SOURCE_DIR}/scripts/gpu_bundle_run ${ARGN})
  set_tests_properties(gpu_bundle_${name} PROPERTIES LABELS gpu TIMEOUT ${timeout}
    PASS_REGULAR_EXPRESSION "^dtensor-gpu: ${expected}"
    ENVIRONMENT "LD_LIBRARY_PATH=${CMAKE_CURRENT_BINARY_DIR}/fake_driver;${environment}")
endfunction()
bundle_refusal(no_stand_in "" "/nowhere has no libcudart.so.13" --stand-in /nowhere)
bundle_refusal(no_device "FAKE_INIT=100" "the driver finds no CUDA device")
bundle_refusal(broken_driver "FAKE_INIT=999" "the driver does not start .cuInit: error 999")
bundle_refusal(old_driver "FAKE_VERSION=12080;FAKE_COUNT=1;FAKE_SM=90"
  "the driver is for CUDA 12.8, 13.0 is needed .driver 580 or later")
bundle_refusal(no_count "FAKE_VERSION=13000" "the driver finds no CUDA device .cuDeviceGetCount: 0")
bundle_refusal(old_device "FAKE_VERSION=13000;FAKE_COUNT=1;FAKE_SM=75"
  "Fake GPU has compute capability 7.5, at least 8.0 is needed")

# Faults of the device, and what a program says of them; and the same program without.
add_executable(cuda_step cuda/step.cc)
# gmock only for the definitions that the precompiled header was compiled with.
target_link_libraries(cuda_step PRIVATE dtensor_ops GTest::gmock nlohmann_json::nlohmann_json)
target_precompile_headers(cuda_step REUSE_FROM precompiled)
add_library(cuda_old_plugin MODULE cuda/old_plugin.cc)
target_include_directories(cuda_old_plugin PRIVATE ${DT_INCLUDE})
target_compile_options(cuda_old_plugin PRIVATE -Wno-missing-field-initializers)
# cuda_fault(name environment expected arguments...)
function(cuda_fault name environment expected)
  add_test(NAME gpu_fault_${name} COMMAND cuda_step ${ARGN})
  set_tests_properties(gpu_fault_${name} PROPERTIES LABELS gpu TIMEOUT ${timeout}
    PASS_REGULAR_EXPRESSION "${expected}" ENVIRONMENT "DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};\
LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib;${environment}")
endfunction()
# A recorded step: spans of the device beside the host's, and ranges for a profiler.
get_filename_component(cuda_home ${DT_NVCC} DIRECTORY)
get_filename_component(cuda_home ${cuda_home} DIRECTORY)
add_library(cuda_nvtx_injection MODULE cuda/nvtx_injection.cc)
target_include_directories(cuda_nvtx_injection SYSTEM PRIVATE ${cuda_home}/include)
cuda_fault(timeline "" "products 2, on the device 2, that take time 2" timeline --device=cuda)
cuda_fault(timeline_ranges "NVTX_INJECTION64_PATH=$<TARGET_FILE:cuda_nvtx_injection>"
  "push matmul\n.*pop\n.*push relu\n" timeline --device=cuda)
cuda_fault(timeline_error "" "error: .*remainder. a whole number is divided by 0" "timeline divide"
  --device=cuda)
cuda_fault(timeline_cpu "" "products 2, on the device 0, that take time 0" timeline)
set(two --ranks=2 --device=cuda)
cuda_fault(none_cpu "" "^sum -18722\n$" --ranks=1)
cuda_fault(none "" "^sum -18722\n$" ${two})
cuda_fault(auto "" "device: cuda\nsum -18722\n$" --ranks=2 --device=auto)
cuda_fault(auto_without "DT_CUSIM_DEVICES=0" "device: cpu .device cuda: counting .*no CUDA.*sum -18722\n$"
  --ranks=2 --device=auto)
cuda_fault(no_device "DT_CUSIM_DEVICES=0"
  "error: .*device cuda: counting devices failed, cudaGetDeviceCount: no CUDA-capable device" ${two})
cuda_fault(no_plugin "DTENSOR_CUDA_PLUGIN=/nowhere.so"
  "error: .*device cuda: loading its plugin libdtensor_cuda.so failed, it cannot be loaded" ${two})
cuda_fault(other_library "DTENSOR_CUDA_PLUGIN=$<TARGET_FILE:cusim_cudart>"
  "error: .*device cuda: loading its plugin .* is none" ${two})
cuda_fault(other_abi "DTENSOR_CUDA_PLUGIN=$<TARGET_FILE:cuda_old_plugin>"
  "error: .*device cuda: loading its plugin .*the table has abi 10 .*needs abi 4" ${two})
cuda_fault(not_opened "DT_CUSIM_FAIL=cudaSetDevice:1=46"
  "error: .*device cuda:0: opening it failed, cudaSetDevice: " ${two})
cuda_fault(no_stream "DT_CUSIM_FAIL=cudaStreamCreateWithFlags:2=2"
  "error: .*rank [01].*making a stream failed, out of memory" ${two})
cuda_fault(no_pinned "DT_CUSIM_FAIL=cudaHostAlloc:2=2"
  "error: .*rank [01].*taking pinned memory failed, out of memory" ${two})
# Who is refused asks once more; of three refusals among two ranks one has two.
cuda_fault(no_memory "DT_CUSIM_FAIL=cudaMalloc:1=2,cudaMalloc:2=2,cudaMalloc:3=2"
  "error: .*rank [01].*cannot allocate [0-9]+ bytes on cuda: the device has no more" ${two})
cuda_fault(memory_on_asking_again "DT_CUSIM_FAIL=cudaMalloc:1=2" "^sum -18722\n$" ${two})
cuda_fault(small "DT_CUSIM_MEMORY=1000000"
  "error: .*rank [01].*cannot allocate [0-9]+ bytes on cuda: the device has no more" ${two})
# A device that has failed has no want of memory.
cuda_fault(memory_of_a_dead_device "DT_CUSIM_FAIL=cudaMalloc:1=719,cudaMalloc:2=719,cudaMalloc:3=719"
  "error: .*device cuda.* taking memory failed, unspecified launch failure" ${two})
cuda_fault(launch "DT_CUSIM_FAIL=cudaLaunchKernel:3=719"
  "error: .*device cuda.* failed, .*unspecified launch failure" ${two})
# Launches after one that was refused do not hide it.
cuda_fault(sorts "" "^sorted 0 to 1999\n$" sort --device=cuda)
cuda_fault(first_launch "DT_CUSIM_FAIL=cudaLaunchKernel:1=9"
  "error: .*device cuda:0: .*invalid configuration argument" sort --device=cuda)
cuda_fault(hang "DT_CUSIM_LIMIT=3"
  "error: .*device cuda:0: .*the launch timed out and was terminated" ${two})
cuda_fault(ecc "DT_CUSIM_FAIL=cudaEventQuery:2=214"
  "error: .*device cuda.* failed, .*uncorrectable ECC error" ${two})
cuda_fault(bad_data "" "error: .*rank [01]: .remainder. a whole number is divided by 0" divide ${two})

# Products of f32 by cuBLASLt: in full, or as tf32 where the environment wishes.
set(product --ranks=1 --device=cuda product)
cuda_fault(product "" "^product 1.000489235\n$" ${product})
cuda_fault(product_tf32 "DTENSOR_CUDA_TF32=1" "^product 1.000976562\n$" ${product})
cuda_fault(product_tf32_off "DTENSOR_CUDA_TF32=0" "^product 1.000489235\n$" ${product})
cuda_fault(product_tf32_bad "DTENSOR_CUDA_TF32=yes"
  "error: .*DTENSOR_CUDA_TF32 must be 0 or 1, is .yes." ${product})

# Ranks with a device each, by NCCL.
if(NOT TARGET cusim_nccl)
  message(STATUS "not on cuda: ranks with a device each: no nccl.h, so no stand-in for NCCL")
  return()
endif()
get_target_property(cuda_includes cusim_nccl INCLUDE_DIRECTORIES)
add_executable(cuda_nccl_test cuda/nccl_test.cc)
add_executable(cuda_nccl_conformance cuda/nccl_conformance.cc)
target_link_libraries(cuda_nccl_conformance PRIVATE test_conformance)
foreach(program cuda_nccl_test cuda_nccl_conformance)
  target_link_libraries(${program} PRIVATE dtensor_mesh GTest::gmock GTest::gtest_main)
  target_precompile_headers(${program} REUSE_FROM precompiled)
  target_include_directories(${program} PRIVATE ${PROJECT_SOURCE_DIR})
endforeach()
target_include_directories(cuda_nccl_test SYSTEM PRIVATE ${cuda_includes})
add_executable(cuda_nccl_mismatch cuda/nccl_mismatch.cc)
target_link_libraries(cuda_nccl_mismatch PRIVATE dtensor_mesh)
foreach(program cuda_nccl_test cuda_nccl_conformance cuda_nccl_mismatch cuda_step)
  add_dependencies(${program} cusim_nccl dtensor_cuda)
endforeach()
cuda_test_as(nccl_test cuda_nccl_test * DT_CUSIM_DEVICES=3)
# Other numbers of ranks (up to 8), calls in pieces, processes,
# and what is left out here for its time (large and many transfers), by hand.
cuda_test_halves(nccl_conformance_each cuda_nccl_conformance */Nccl2 DT_CUSIM_DEVICES=8
  DTENSOR_CHECK=each)
# Where calls are not compared, what is wrong with one that overlaps is told where the host waits
# for the device: cuda_nccl_test. Groups have the timeout of their world.
cuda_test_halves(nccl_conformance cuda_nccl_conformance
  */Nccl3-*Mismatch.*Overlapped*:*Fault.A*Rank*:*Fault.AnAbort*:*AbortsDuringTransfers*:*AGroupMayHave*:*Numbers.AllReduce/*
  DT_CUSIM_DEVICES=8)
cuda_fault(nccl_none "DT_CUSIM_DEVICES=2" "^sum -18722\n$" ${two})
cuda_fault(nccl_chosen "DT_CUSIM_DEVICES=2;DTENSOR_LOG=comm"
  "comm: ranks 0, 1 as tp: nccl .NVIDIA's library, each rank has a GPU of its own.. peers, many_pieces, overlap, same_bits, graphs"
  ${two})
cuda_fault(nccl_shared "DTENSOR_LOG=comm" "comm: ranks 0, 1 as tp: local " ${two})
cuda_fault(nccl_mixed "DT_CUSIM_DEVICES=2"
  "error: .*ranks 0 and 2 share GPU 0 while others of their group have another" --ranks=3
  --device=cuda)
cuda_fault(nccl_missing "DT_CUSIM_DEVICES=2;DTENSOR_NCCL_LIBRARY=/nowhere.so"
  "error: .*by NCCL: it cannot be loaded .*DTENSOR_NCCL_LIBRARY" ${two})
cuda_fault(nccl_other_library "DT_CUSIM_DEVICES=2;DTENSOR_NCCL_LIBRARY=$<TARGET_FILE:cusim_cudart>"
  "error: .*by NCCL: .* has no function nccl" ${two})
cuda_fault(nccl_old "DT_CUSIM_DEVICES=2;DT_CUSIM_NCCL_VERSION=21003"
  "error: .*libnccl.so.2 is version 2.10.3, at least 2.18.0 is needed" ${two})
cuda_fault(nccl_init "DT_CUSIM_DEVICES=2;DT_CUSIM_FAIL=ncclCommInitRankConfig:1=3"
  "error: .*rank [01].*NCCL 2[.0-9]*: ncclCommInitRankConfig: internal error" ${two})
cuda_fault(nccl_call "DT_CUSIM_DEVICES=2;DT_CUSIM_FAIL=ncclGroupEnd:1=2"
  "error: .*rank [01].*NCCL 2[.0-9]*: ncclGroupEnd: unhandled system error" ${two})
cuda_fault(nccl_check "DT_CUSIM_DEVICES=2;DTENSOR_CHECK=all" "error: .*DTENSOR_CHECK is .all.: give each"
  ${two})
add_test(NAME gpu_fault_nccl_mismatch COMMAND cuda_nccl_mismatch)
set_tests_properties(gpu_fault_nccl_mismatch PROPERTIES LABELS gpu TIMEOUT ${timeout}
  PASS_REGULAR_EXPRESSION "told: rank [01].*NCCL 2[.0-9]*: nccl[A-Za-z]*: invalid usage.*rank 0 calls ncclAllReduce.8 x"
  ENVIRONMENT "DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};DT_CUSIM_DEVICES=2;\
LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib")
# One rank per process.
include(processes/cuda.cmake)
