// Releases the GIL around calls that wait, and handles the interpreter's end.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

namespace gdsdata {

// If a thread asks for the GIL while the interpreter ends, Python ends it in the middle of its C++
// frames. So waiting calls are asked to return before. If one does not, it sleeps forever.
struct InterpreterEnd {
  std::atomic<bool> begun{false}, done{false};
  std::atomic<int> waiting_calls{0};
};
extern InterpreterEnd interpreter_end;

// Releases the GIL during a call that waits. At the interpreter's end the GIL is kept.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// For objects whose destructor waits for threads or the device. The thread that drops the last
// reference may hold the GIL.
template <typename T>
std::shared_ptr<T> ends_without_gil(std::unique_ptr<T> instance) {
  return {instance.release(), [](T* last) {
            std::optional<WithoutGil> nogil;
            if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) nogil.emplace();
            delete last;
          }};
}

// Call it between waits: Ctrl-C raises its exception, and the interpreter's end throws kClosed.
void check_signals();

// Adds `begin_exit`, `waiting_calls` and `end_exit` to the module.
void bind_interpreter_end(pybind11::module_& module);

}  // namespace gdsdata
