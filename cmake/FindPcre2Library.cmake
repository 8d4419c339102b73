# PCRE2 for 8-bit code units, found by header and library.
find_path(PCRE2_INCLUDE_DIR pcre2.h)
find_library(PCRE2_LIBRARY pcre2-8)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Pcre2Library
  REASON_FAILURE_MESSAGE "install libpcre2-dev" REQUIRED_VARS PCRE2_LIBRARY PCRE2_INCLUDE_DIR)
if(Pcre2Library_FOUND AND NOT TARGET dtensor_pcre2)
  add_library(dtensor_pcre2 UNKNOWN IMPORTED)
  set_target_properties(dtensor_pcre2 PROPERTIES IMPORTED_LOCATION ${PCRE2_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${PCRE2_INCLUDE_DIR})
endif()
