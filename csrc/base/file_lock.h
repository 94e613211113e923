// Locks on single bytes of files, which the kernel releases when their holder ends.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cstdint>
#include <string>

namespace gdsdata {

// Far beyond the end of any file, because some file systems make locks mandatory.
inline constexpr uint64_t kFirstLockByte = uint64_t{1} << 62;

enum class Lock { kTaken, kHeld, kUnsupported };

// These do not wait. `type` is F_RDLCK (shared), F_WRLCK or F_UNLCK.
//
// A lock of an open file description. Other threads of this process that opened the file themselves
// respect it, and closing another descriptor does not release it. A forked child shares it: it is
// released when both have closed the descriptor, or one of them has unlocked it.
Lock lock_description(int fd, short type, uint64_t byte);
// A lock of this process. Its threads share it and forked children do not. It is released when the
// process closes any descriptor of the file.
Lock lock_process(int fd, short type, uint64_t byte);

// Waits for a shared lock of the description.
Lock wait_for_shared(int fd, uint64_t byte);

// Returns true if another description has a lock on the byte.
bool is_locked(int fd, uint64_t byte);

// Returns true if `name` in a folder, or AT_FDCWD, is still that of the file that was opened by it.
// Ask once the lock is taken: its holder before may have removed or renamed the file.
bool is_named(int folder, const std::string& name, const struct stat& file);

}  // namespace gdsdata
