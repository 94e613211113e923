// Notes of what was done in another way than requested, and why, for reports to the user. They last
// as long as the process. Thread-safe.
#pragma once

#include <string>
#include <vector>

namespace gdsdata {

// Keeps the first few different notes.
void note_fallback(const std::string& what_and_why);
std::vector<std::string> noted_fallbacks();

}  // namespace gdsdata
