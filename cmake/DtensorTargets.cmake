# dt_library(folder deps...): one library per folder, static unless BUILD_SHARED_LIBS. `folder/*.cc` are compiled once;
# `folder/kernels/*.cc` once per CPU level, in the namespace DT_LEVEL_NS, never shared.
function(dt_library folder)
  set(target dtensor_${folder})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc
       ${CMAKE_CURRENT_SOURCE_DIR}/models/*.cc ${CMAKE_CURRENT_SOURCE_DIR}/local/*.cc
       ${CMAKE_CURRENT_SOURCE_DIR}/fake/*.cc)
  add_library(${target} ${sources})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include/dtensor-runtime>)
  target_link_libraries(${target} PUBLIC ${ARGN})
  target_compile_options(${target} PRIVATE ${DT_CHECKED_STATUS})
  target_compile_features(${target} PUBLIC cxx_std_20)  # the headers need it: consumers too
  # Faster to compile; the release build shows that each file includes what it uses.
  if(DT_SANITIZE)
    target_compile_options(${target} PRIVATE ${DT_PRECOMPILED})
    if(folder STREQUAL tensor)
      target_precompile_headers(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/precompiled.h)
    else()
      target_precompile_headers(${target} REUSE_FROM dtensor_tensor)
    endif()
  endif()
  # dtensor::dtensor is the whole (cmake/DtensorInstall.cmake); the folder of that name the engine.
  set(export ${folder})
  if(folder STREQUAL dtensor)
    set(export engine)
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${export})
  file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/kernels/*.cc)
  if(kernels)
    dt_add_level(${target} baseline "" "${kernels}")
    dt_add_level(${target} v3 "-mavx2;-mfma;-mf16c;-mbmi2" "${kernels}")
    dt_add_level(${target} v4
      "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx2;-mfma;-mf16c;-mbmi2;-mprefer-vector-width=512"
      "${kernels}")
  endif()
  install(TARGETS ${target} EXPORT dtensorTargets ARCHIVE DESTINATION lib LIBRARY DESTINATION lib)
endfunction()

function(dt_add_level target level flags kernels)
  set(objects ${target}_${level})
  add_library(${objects} OBJECT ${kernels})
  target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR})
  # -O3 for vectorised loops also where the build type says less, but not under sanitizers, where
  # it takes five times as long to compile; nothing may leak between levels.
  set(optimize -O3)
  if(DT_SANITIZE)
    set(optimize -O1)
  endif()
  target_compile_options(${objects} PRIVATE ${flags} ${optimize} ${DT_KERNEL_SANITIZE}
    -fno-math-errno -fno-trapping-math -fvisibility=hidden -fno-semantic-interposition)
  target_compile_definitions(${objects} PRIVATE DT_LEVEL_NS=cpu_${level}
    DT_LEVEL_$<UPPER_CASE:${level}>=1)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()
