// The libraries that stand for NVIDIA's in these tests, and what they offer besides.
// GDSDATA_TEST_REAL_CUDA=1 leaves the engine the real ones; tests that ask something of a fake then
// skip.
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

// The function of that name in a fake. The engine must have loaded the fake, or not need it any
// more.
void* fake_function(const std::string& library, const char* name);

// FAKE(cuda, fake_cuda_fail_next)("cuMemAlloc", 2)
#define FAKE(library, function) \
  reinterpret_cast<decltype(&(function))>(::gdsdata::testing::fake_function(#library, #function))

// cuda:`ordinal`, or null where there is none; then the test is to skip.
std::shared_ptr<Device> test_device(int ordinal = 0);

}  // namespace gdsdata::testing

#define SKIP_WITH_REAL_CUDA() \
  if (::gdsdata::testing::real_cuda()) GTEST_SKIP() << "asks something of the fake driver"
