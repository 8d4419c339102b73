#include "dtensor/tensor/plugin.h"

#include <dlfcn.h>
#include <limits.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dtensor {
namespace {

std::vector<std::string> PathsOf(const char* plugin, const char* variable, const char* folder) {
  if (const char* path = std::getenv(variable); path != nullptr) return {path};
  std::vector<std::string> paths, files;
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&LoadPlugin), &info) != 0 && info.dli_fname != nullptr) {
    files.emplace_back(info.dli_fname);
  }
  char program[PATH_MAX] = "";
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) > 0) files.emplace_back(program);
  for (const std::string& file : files) {
    if (file.rfind('/') == std::string::npos) continue;  // the program, by its name only
    for (const std::string& way :
         {std::string(), absl::StrCat("../", folder, "/"), std::string("../lib/")}) {
      paths.push_back(absl::StrCat(file.substr(0, file.rfind('/') + 1), way, plugin));
    }
  }
  paths.emplace_back(plugin);
  return paths;
}

}  // namespace

absl::StatusOr<void*> LoadPlugin(const char* file, const char* variable, const char* folder,
                                 const char* entry, bool global) {
  std::vector<std::string> tried;
  const std::vector<std::string> paths = PathsOf(file, variable, folder);
  for (const std::string& path : paths) {
    void* library = dlopen(path.c_str(), RTLD_NOW | (global ? RTLD_GLOBAL : RTLD_LOCAL));
    if (library == nullptr) {
      const char* why = dlerror();
      // Of the places where it is not the last is named; of a file that cannot be loaded, why.
      if (access(path.c_str(), F_OK) != 0 && &path != &paths.back()) continue;
      tried.emplace_back(why);
      continue;
    }
    if (void* function = dlsym(library, entry); function != nullptr) return function;
    return absl::InvalidArgumentError(absl::StrCat(path, " is none"));
  }
  return absl::NotFoundError(absl::StrCat("cannot be loaded (", absl::StrJoin(tried, "; "), ")"));
}

}  // namespace dtensor
