# find_package(dtensor): targets dtensor::tensor .. dtensor::parallel, and dtensor::dtensor for all.
include(CMakePackageConfigHelpers)
foreach(folder tensor mesh rng dtensor ops parallel)
  install(DIRECTORY ${folder} DESTINATION include/dtensor-runtime
    FILES_MATCHING PATTERN "*.h" PATTERN "*.inc")
endforeach()
install(EXPORT dtensorTargets NAMESPACE dtensor:: DESTINATION lib/cmake/dtensor)
configure_package_config_file(cmake/dtensorConfig.cmake.in dtensorConfig.cmake
  INSTALL_DESTINATION lib/cmake/dtensor)
write_basic_package_version_file(dtensorConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/dtensorConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/dtensorConfigVersion.cmake
  cmake/FindDnnlLibrary.cmake cmake/FindOpenBLASLibrary.cmake DESTINATION lib/cmake/dtensor)
