// The libraries that replace NVIDIA's in these tests, and their additional functions. With
// GDSDATA_TEST_REAL_CUDA=1 the engine uses the real ones, and tests that need a fake are skipped.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"
#include "fake_cuda.h"
#include "fake_cufile.h"

namespace gdsdata::testing {

bool real_cuda();

// The path of a fake: "cuda", "cufile".
std::string fake_library(const std::string& name);

// The function of that name in a fake. Call it after the engine has loaded the fake, or when the
// engine no longer needs it.
void* fake_function(const std::string& library, const char* name);

// FAKE(cuda, fake_cuda_fail_next)("cuMemAlloc", 2)
#define FAKE(library, function) \
  reinterpret_cast<decltype(&(function))>(::gdsdata::testing::fake_function(#library, #function))

// cuda:`ordinal`, or null if there is none; then skip the test.
std::shared_ptr<Device> test_device(int ordinal = 0);

}  // namespace gdsdata::testing

#define SKIP_WITH_REAL_CUDA() \
  if (::gdsdata::testing::real_cuda()) GTEST_SKIP() << "asks something of the fake driver"
