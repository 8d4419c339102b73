# oneDNN, found by header and library: Debian's own config file needs OpenCL headers.
find_path(DNNL_INCLUDE_DIR dnnl.h)
find_library(DNNL_LIBRARY dnnl)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(DnnlLibrary
  REASON_FAILURE_MESSAGE "install libdnnl-dev" REQUIRED_VARS DNNL_LIBRARY DNNL_INCLUDE_DIR)
if(DnnlLibrary_FOUND AND NOT TARGET dtensor_dnnl)
  add_library(dtensor_dnnl UNKNOWN IMPORTED)
  set_target_properties(dtensor_dnnl PROPERTIES IMPORTED_LOCATION ${DNNL_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${DNNL_INCLUDE_DIR})
endif()
