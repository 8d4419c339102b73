# Test programs on the CUDA device, on the stand-in for its runtime (tests/cusim): ctest -L gpu. What
# has run there was executed instruction by instruction, never on a GPU.
if(NOT DT_CUDA_PLUGIN OR NOT TARGET cusim_cudart)
  message(STATUS "not on cuda: all test programs: no plugin was built")
  return()
endif()

# cuda_test(program filter environment...): one run per schedule seed, with no report of any kind.
function(cuda_test program filter)
  foreach(seed 0 1)
    set(name gpu_${program}_${seed})
    add_test(NAME ${name} COMMAND ${program} --gtest_filter=${filter})
    set_tests_properties(${name} PROPERTIES LABELS gpu TIMEOUT ${timeout}
      FAIL_REGULAR_EXPRESSION "cusim: "
      ENVIRONMENT "DTENSOR_CUDA_PLUGIN=${DT_CUDA_PLUGIN};DT_CUSIM_SEED=${seed};\
DT_CUSIM_STRICT=1;LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/cusim/lib;${ARGN}")
  endforeach()
endfunction()

# Every op against the CPU, an eighth of them in CI; by kernels of ours alone, whose bits are known.
cuda_test(ops_far_bits_test * DT_TEST_DEVICE=cuda DTENSOR_CUDA_BLAS=own DT_THIN=1)
# The GPT's training on 1 and on 2 x 2 ranks, a model of whole numbers, random numbers, bad data.
cuda_test(parallel_far_suite_test * DT_TEST_DEVICE=cuda)

# Lists in one launch.
cuda_test(ops_call_list_test * DT_TEST_DEVICE=cuda)
# What kernels and steps launch, move and wait for, against tests/data/cuda_counts.txt.
add_executable(cuda_counts_test cuda/counts_test.cc)
target_link_libraries(cuda_counts_test PRIVATE dtensor_parallel GTest::gtest test_main ${CMAKE_DL_LIBS})
target_include_directories(cuda_counts_test PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_definitions(cuda_counts_test PRIVATE DT_TEST_DATA="${CMAKE_CURRENT_SOURCE_DIR}/data")
cuda_test(cuda_counts_test * DTENSOR_CUDA_BLAS=own DT_CUSIM_RACES=0)

# Faults of the device, and what a program says of them; and the same program without.
add_executable(cuda_step cuda/step.cc)
target_link_libraries(cuda_step PRIVATE dtensor_ops)
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
  "error: .*device cuda: loading its plugin .*the table has abi 7 .*needs abi 1" ${two})
cuda_fault(not_opened "DT_CUSIM_FAIL=cudaSetDevice:1=46"
  "error: .*device cuda:0: opening it failed, cudaSetDevice: " ${two})
cuda_fault(no_stream "DT_CUSIM_FAIL=cudaStreamCreateWithFlags:2=2"
  "error: .*rank [01].*making a stream failed, out of memory" ${two})
cuda_fault(no_pinned "DT_CUSIM_FAIL=cudaHostAlloc:2=2"
  "error: .*rank [01].*taking pinned memory failed, out of memory" ${two})
cuda_fault(no_memory "DT_CUSIM_FAIL=cudaMalloc:1=2,cudaMalloc:2=2"
  "error: .*rank [01].*cannot allocate [0-9]+ bytes on cuda: the device has no more" ${two})
cuda_fault(memory_on_asking_again "DT_CUSIM_FAIL=cudaMalloc:1=2" "^sum -18722\n$" ${two})
cuda_fault(small "DT_CUSIM_MEMORY=1000000"
  "error: .*rank [01].*cannot allocate [0-9]+ bytes on cuda: the device has no more" ${two})
cuda_fault(launch "DT_CUSIM_FAIL=cudaLaunchKernel:3=719"
  "error: .*device cuda.* failed, .*unspecified launch failure" ${two})
cuda_fault(ecc "DT_CUSIM_FAIL=cudaEventQuery:2=214"
  "error: .*device cuda:0: .* failed, uncorrectable ECC error" ${two})
cuda_fault(bad_data "" "error: .*rank [01]: .remainder. a whole number is divided by 0" divide ${two})

# Products of f32 by cuBLASLt: in full, or as tf32 where the environment wishes.
set(product --ranks=1 --device=cuda product)
cuda_fault(product "" "^product 1.000489235\n$" ${product})
cuda_fault(product_tf32 "DTENSOR_CUDA_TF32=1" "^product 1.000976562\n$" ${product})
cuda_fault(product_tf32_off "DTENSOR_CUDA_TF32=0" "^product 1.000489235\n$" ${product})
cuda_fault(product_tf32_bad "DTENSOR_CUDA_TF32=yes"
  "error: .*DTENSOR_CUDA_TF32 must be 0 or 1, is .yes." ${product})
