#include "python/gil.h"

#include <unistd.h>

#include "base/error.h"

namespace py = pybind11;

namespace gdsdata {

InterpreterEnd interpreter_end;

WithoutGil::WithoutGil() {
  if (interpreter_end.done) return;
  ++interpreter_end.waiting_calls;
  state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ == nullptr) return;
  while (interpreter_end.done) ::pause();
  PyEval_RestoreThread(state_);
  --interpreter_end.waiting_calls;
}

void check_signals() {
  if (interpreter_end.begun) throw Failure({ErrorCode::kClosed, "the interpreter ends, and this call with it"});
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void bind_interpreter_end(py::module_& module) {
  module.def("begin_exit", [] { interpreter_end.begun = true; });
  module.def("waiting_calls", [] { return interpreter_end.waiting_calls.load(); });
  module.def("end_exit", [] { interpreter_end.done = true; });
}

}  // namespace gdsdata
