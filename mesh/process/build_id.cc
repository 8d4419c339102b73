#include "dtensor/mesh/process/build_id.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dtensor {
namespace {

// Empty where there is none. Names and values of notes are padded to 4 bytes.
std::string IdIn(absl::string_view notes) {
  const auto padded = [](size_t n) { return (n + 3) / 4 * 4; };
  ElfW(Nhdr) head;
  while (notes.size() >= sizeof(head)) {
    std::memcpy(&head, notes.data(), sizeof(head));
    const size_t name = padded(head.n_namesz), value = padded(head.n_descsz);
    if (notes.size() < sizeof(head) + name + value) break;
    if (head.n_type == NT_GNU_BUILD_ID &&
        notes.substr(sizeof(head), head.n_namesz) == absl::string_view("GNU", 4)) {
      return absl::BytesToHexString(notes.substr(sizeof(head) + name, head.n_descsz));
    }
    notes.remove_prefix(sizeof(head) + name + value);
  }
  return "";
}

struct Found {
  std::string program;
  std::vector<std::string> libraries;
};

int Look(dl_phdr_info* info, size_t, void* found_ptr) {
  auto* found = static_cast<Found*>(found_ptr);
  const absl::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  const absl::string_view name = path.substr(path.rfind('/') + 1);
  if (!path.empty() && !absl::StartsWith(name, "libdtensor")) return 0;
  // A device's plugin is loaded by whoever uses that device first, and has an abi of its own.
  if (absl::StartsWith(name, "libdtensor_cuda.")) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    if (part.p_type != PT_NOTE) continue;
    const std::string id = IdIn(absl::string_view(
        reinterpret_cast<const char*>(info->dlpi_addr + part.p_vaddr), part.p_memsz));
    if (id.empty()) continue;
    if (path.empty()) {
      found->program = id;
    } else {
      found->libraries.push_back(absl::StrCat(name, " ", id));
    }
    break;
  }
  return 0;
}

}  // namespace

std::string BuildId() {
  Found found;
  dl_iterate_phdr(&Look, &found);
  std::sort(found.libraries.begin(), found.libraries.end());
  uint64_t mixed = 14695981039346656037u;  // FNV-1a of what the libraries say
  for (const std::string& library : found.libraries) {
    for (const char c : library) mixed = (mixed ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  std::string id = found.program.empty() ? "none" : found.program.substr(0, 40);
  if (!found.libraries.empty()) absl::StrAppend(&id, "+", absl::Hex(mixed, absl::kZeroPad16));
  return id;
}

}  // namespace dtensor
