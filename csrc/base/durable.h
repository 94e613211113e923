// Changes that a crash does not undo, each once its function has returned.
#pragma once

#include <cstdint>
#include <string>

#include "base/file.h"

namespace gdsdata {

// Each throws Failure. A new name is part of its folder: a crash may restore the old file until the
// folder is synced. `replace` renames and syncs the folder, so after a crash the path names either
// the old file or the new one, complete.
void set_size(const File& file, uint64_t length_bytes);
void preallocate(const File& file, uint64_t length_bytes);
void sync_file(const File& file);
void sync_folder_of(const std::string& path);
void replace(const std::string& temporary, const std::string& path);
// Closes a file that has no name left. If it is large, a thread of its own does so, because freeing
// its blocks takes long.
void free_in_background(Descriptor last);

}  // namespace gdsdata
