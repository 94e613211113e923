#include "fakes.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/error.h"

namespace gdsdata::testing {

namespace {

// Set before main, because the engine looks its libraries up once.
const bool kFakesNamed = [] {
  if (real_cuda()) return false;
  ::setenv("GDSDATA_LIBCUDA", fake_library("cuda").c_str(), 1);
  ::setenv("GDSDATA_LIBCUFILE", fake_library("cufile").c_str(), 1);
  return true;
}();

}  // namespace

bool real_cuda() {
  const char* asked = std::getenv("GDSDATA_TEST_REAL_CUDA");
  return asked != nullptr && std::string(asked) == "1";
}

std::string fake_library(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / ("libfake" + name + ".so");
}

void* fake_function(const std::string& library, const char* name) {
  void* handle = ::dlopen(fake_library(library).c_str(), RTLD_NOW | RTLD_LOCAL);
  void* function = handle == nullptr ? nullptr : ::dlsym(handle, name);
  if (function == nullptr) {
    ADD_FAILURE() << ::dlerror();
    std::abort();
  }
  return function;
}

std::shared_ptr<Device> test_device(int ordinal) {
  try {
    return cuda_device(ordinal);
  } catch (const Failure& failure) {
    if (!real_cuda()) ADD_FAILURE() << failure.what();
    return nullptr;
  }
}

}  // namespace gdsdata::testing
