# find_package(dtensor): dtensor::dtensor is everything; one target per folder besides
# (dtensor::tensor, mesh, rng, engine, ops, parallel).
add_library(dtensor_all INTERFACE)
target_link_libraries(dtensor_all INTERFACE dtensor_parallel)
set_target_properties(dtensor_all PROPERTIES EXPORT_NAME dtensor)
install(TARGETS dtensor_all EXPORT dtensorTargets)
include(CMakePackageConfigHelpers)
install(DIRECTORY dtensor/ DESTINATION include/dtensor FILES_MATCHING PATTERN "*.h")
foreach(folder tensor mesh rng ops parallel)
  install(DIRECTORY ${folder} DESTINATION include/dtensor
    FILES_MATCHING PATTERN "*.h" PATTERN "*.inc")
endforeach()
install(EXPORT dtensorTargets NAMESPACE dtensor:: DESTINATION lib/cmake/dtensor)
configure_package_config_file(cmake/dtensorConfig.cmake.in dtensorConfig.cmake
  INSTALL_DESTINATION lib/cmake/dtensor)
write_basic_package_version_file(dtensorConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/dtensorConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/dtensorConfigVersion.cmake
  cmake/FindDnnlLibrary.cmake cmake/FindOpenBLASLibrary.cmake cmake/FindPcre2Library.cmake
  DESTINATION lib/cmake/dtensor)
# Without the symbols that no linker asks for: a twentieth of the archives, a tenth of the program.
if(CMAKE_STRIP AND CMAKE_BUILD_TYPE STREQUAL Release)
  install(CODE "
    file(GLOB installed \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/lib/libdtensor_*.a\"
      \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/bin/dtensor-run\")
    if(installed)
      execute_process(COMMAND \"${CMAKE_STRIP}\" --strip-unneeded \${installed}
        COMMAND_ERROR_IS_FATAL ANY)
    endif()")
endif()
