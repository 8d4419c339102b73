# OpenBLAS (pthread build), found by header and library.
find_path(OPENBLAS_INCLUDE_DIR cblas.h
  PATH_SUFFIXES openblas x86_64-linux-gnu/openblas-pthread x86_64-linux-gnu)
find_library(OPENBLAS_LIBRARY openblas PATH_SUFFIXES openblas-pthread)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OpenBLASLibrary
  REASON_FAILURE_MESSAGE "install libopenblas-dev" REQUIRED_VARS OPENBLAS_LIBRARY OPENBLAS_INCLUDE_DIR)
if(OpenBLASLibrary_FOUND AND NOT TARGET dtensor_openblas)
  add_library(dtensor_openblas UNKNOWN IMPORTED)
  set_target_properties(dtensor_openblas PROPERTIES IMPORTED_LOCATION ${OPENBLAS_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${OPENBLAS_INCLUDE_DIR})
endif()
