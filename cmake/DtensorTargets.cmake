# Headers are included as they are once installed: the engine's as "dtensor/op.h", those of other
# folders as "dtensor/ops/ops.h". Links in the build folder make it so.
set(DT_INCLUDE ${PROJECT_BINARY_DIR}/include)
file(MAKE_DIRECTORY ${DT_INCLUDE}/dtensor)
foreach(folder tensor mesh rng ops parallel dtensor/verify)
  get_filename_component(name ${folder} NAME)
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/${folder} ${DT_INCLUDE}/dtensor/${name} SYMBOLIC)
endforeach()
file(GLOB engine CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/dtensor/*.h)
foreach(header ${engine})
  get_filename_component(name ${header} NAME)
  file(CREATE_LINK ${header} ${DT_INCLUDE}/dtensor/${name} SYMBOLIC)
endforeach()

# dt_library(folder deps... [HOT regex...]): one library per folder, static unless
# BUILD_SHARED_LIBS.
# Sources are compiled once; those in a folder kernels/ once per CPU level, in the namespace
# DT_LEVEL_NS, never shared. Paths that match HOT are what a call found in the caches runs through,
# search, or loop over elements: all that the build type optimizes. The rest (starting worlds, plans,
# modules, files, judging) is run little, so -Os: half of the size of -Og for little more time.
function(dt_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 library "" "" "HOT")
  set(target dtensor_${folder})
  file(GLOB_RECURSE sources RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS *.cc)
  set(kernels ${sources})
  list(FILTER sources EXCLUDE REGEX "(^|/)kernels/")
  list(FILTER sources EXCLUDE REGEX "^(mpi|gloo)/")  # plugins
  list(FILTER kernels INCLUDE REGEX "(^|/)kernels/")
  set(cold "")
  if(library_HOT)
    set(cold ${sources})
    list(JOIN library_HOT "|" regex)
    list(FILTER cold EXCLUDE REGEX "${regex}")
    list(REMOVE_ITEM sources ${cold})
  endif()
  add_library(${target} ${sources})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${DT_INCLUDE}> $<INSTALL_INTERFACE:include>)
  target_link_libraries(${target} PUBLIC ${library_UNPARSED_ARGUMENTS})
  target_compile_features(${target} PUBLIC cxx_std_20)  # the headers need it: consumers too
  dt_compiled(${target} dtensor_tensor)
  # dtensor::dtensor is the whole (cmake/DtensorInstall.cmake); the folder of that name the engine.
  set(export ${folder})
  if(folder STREQUAL dtensor)
    set(export engine)
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${export} LINKER_LANGUAGE CXX)
  if(cold)
    add_library(${target}_cold OBJECT ${cold})
    foreach(property INCLUDE_DIRECTORIES COMPILE_DEFINITIONS)
      set_target_properties(${target}_cold PROPERTIES
        ${property} "$<TARGET_PROPERTY:${target},${property}>")
    endforeach()
    target_compile_features(${target}_cold PUBLIC cxx_std_20)
    target_compile_options(${target}_cold PRIVATE $<$<CONFIG:Release>:-Os>)
    dt_compiled(${target}_cold dtensor_mesh_cold)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_cold>)
  endif()
  if(kernels)
    dt_add_level(${target} baseline "" "${kernels}")
    dt_add_level(${target} v3 "-mavx2;-mfma;-mf16c;-mbmi2" "${kernels}")
    set(v4 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mbmi2
      -mprefer-vector-width=512)
    dt_add_level(${target} v4 "${v4}" "${kernels}")
  endif()
  install(TARGETS ${target} EXPORT dtensorTargets ARCHIVE DESTINATION lib LIBRARY DESTINATION lib)
endfunction()

# How the files of a library are compiled; `precompiled`: the target that has the header of others
# for its optimization level (g++ 12 crashes where one of another level is used).
function(dt_compiled target precompiled)
  target_compile_options(${target} PRIVATE ${DT_CHECKED_STATUS})
  # Most of the time to compile a file is to read headers of others. Without
  # (-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON) one sees that each file includes what it uses.
  target_compile_options(${target} PRIVATE ${DT_PRECOMPILED})
  if(target STREQUAL precompiled)
    target_precompile_headers(${target} PRIVATE ${DT_OTHERS_HEADERS})
  else()
    target_precompile_headers(${target} REUSE_FROM ${precompiled})
  endif()
  # Eight files compiled as one take half the time. Where little is optimized most of it is to read
  # headers, once per unit: there thirty-two.
  if(DT_UNITY)
    set(files_in_one 8)
    if(target MATCHES "_cold$")
      set(files_in_one 32)
    endif()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON
      UNITY_BUILD_BATCH_SIZE ${files_in_one})
    # g++ inlines into a large file as it does into a small one: what every call runs through counts
    # its instructions (bench/count_instructions). A source is no header because it is included; the
    # other warnings see more of std::string, falsely.
    if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      target_compile_options(${target} PRIVATE --param=large-unit-insns=1000000
        -Wno-subobject-linkage -Wno-array-bounds -Wno-stringop-overflow)
    endif()
  endif()
  # No macro of its own in a shared library: the precompiled header is one for all.
  set_target_properties(${target} PROPERTIES DEFINE_SYMBOL "")
endfunction()

function(dt_add_level target level flags kernels)
  set(objects ${target}_${level})
  add_library(${objects} OBJECT ${kernels})
  target_include_directories(${objects} PRIVATE ${DT_INCLUDE})
  # -O3 for vectorised loops also where the build type says less, but not under sanitizers, where
  # it takes five times as long to compile, and less for processors older than AVX2, where it takes
  # twice as long; nothing may leak between levels.
  set(optimize -O3)
  if(DT_SANITIZE)
    set(optimize -O1)
  elseif(level STREQUAL baseline)
    set(optimize -O2)
  endif()
  # A choice that is the same for a whole loop is made before it, however long its body is.
  set(unswitch "")
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND NOT DT_SANITIZE)
    set(unswitch --param=max-unswitch-insns=400)
  endif()
  target_compile_options(${objects} PRIVATE ${flags} ${optimize} ${unswitch} ${DT_KERNEL_SANITIZE}
    -fno-math-errno -fno-trapping-math -fno-semantic-interposition)
  if(NOT BUILD_SHARED_LIBS)  # tests compare the levels' loops
    target_compile_options(${objects} PRIVATE -fvisibility=hidden)
  endif()
  target_compile_definitions(${objects} PRIVATE DT_LEVEL_NS=cpu_${level}
    DT_LEVEL_$<UPPER_CASE:${level}>=1)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
endfunction()
