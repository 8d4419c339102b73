# Ranks over gloo, started by dtensor-run, and as torchrun starts them.
if(NOT has_gloo)
  add_test(NAME dtensor_run COMMAND ${CMAKE_COMMAND} -E echo
    "skipped: no gloo (apt: libgloo-dev), no examples, or a sanitizer")
  set_tests_properties(dtensor_run PROPERTIES LABELS processes SKIP_REGULAR_EXPRESSION "^skipped")
  return()
endif()
foreach(test dtensor_run_test dtensor_run_output_test torchrun_test)
  add_executable(processes_${test} processes/${test}.cc)
  target_link_libraries(processes_${test} PRIVATE GTest::gmock GTest::gtest_main
    absl::strings absl::time nlohmann_json::nlohmann_json)
  target_precompile_headers(processes_${test} REUSE_FROM precompiled)
  target_include_directories(processes_${test} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(processes_${test} PRIVATE DT_RUN="$<TARGET_FILE:dtensor-run>"
    DT_PROGRAM="$<TARGET_FILE:processes_program>" DT_TRAIN_GPT="$<TARGET_FILE:train_gpt>"
    DT_CALIBRATE="$<TARGET_FILE:calibrate>"
    DT_TORCHRUN_RANK="${CMAKE_CURRENT_SOURCE_DIR}/processes/torchrun_rank")
  add_dependencies(processes_${test} dtensor-run processes_program train_gpt calibrate)
  add_test(NAME processes_${test} COMMAND processes_${test})
endforeach()
set(gloo_tests processes_dtensor_run_test processes_dtensor_run_output_test
  processes_torchrun_test)
foreach(n 2 4)
  add_test(NAME processes_gloo_conformance_${n} COMMAND dtensor-run --nproc-per-node ${n} --
    $<TARGET_FILE:processes_conformance> --gtest_brief=1 --gtest_filter=${ranks_${n}})
  # Its worlds fail, and the launcher keeps a folder with a flight report.
  set_tests_properties(processes_gloo_conformance_${n} PROPERTIES ENVIRONMENT
    DTENSOR_FLIGHT_REPORT=${CMAKE_CURRENT_BINARY_DIR}/processes_gloo_conformance_${n}.json)
  list(APPEND gloo_tests processes_gloo_conformance_${n})
endforeach()
foreach(suite ${process_suites})
  add_test(NAME processes_gloo_${suite} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/processes/suite
    $<TARGET_FILE:dtensor-run> --nproc-per-node 2 ${CMAKE_CURRENT_BINARY_DIR}/${suite}
    ${of_threads})
  list(APPEND gloo_tests processes_gloo_${suite})
endforeach()
set_tests_properties(${gloo_tests} PROPERTIES LABELS processes TIMEOUT ${timeout})
