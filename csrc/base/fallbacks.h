// What was done another way than asked, and why: for whoever tells the user. Thread-safe; for the
// process's life.
#pragma once

#include <string>
#include <vector>

namespace gdsdata {

// The first few different ones are remembered.
void note_fallback(const std::string& what_and_why);
std::vector<std::string> noted_fallbacks();

}  // namespace gdsdata
