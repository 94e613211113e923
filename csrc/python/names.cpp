#include "python/names.h"

#include <algorithm>
#include <vector>

namespace py = pybind11;

namespace gdsdata {

namespace {

struct Name {
  py::object dictionary, name;
  size_t place;  // of its object among those that were looked for
};

// Appends the names of `dictionary` whose values are among `objects`. The caller has the GIL, and
// no code of Python runs here, so nothing changes the dictionary meanwhile.
void find_names_in(PyObject* dictionary, const std::vector<PyObject*>& objects, std::vector<Name>& found) {
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(dictionary, &position, &name, &value) != 0;) {
    const auto object = std::find(objects.begin(), objects.end(), value);
    if (object == objects.end()) continue;
    found.push_back({py::reinterpret_borrow<py::object>(dictionary), py::reinterpret_borrow<py::object>(name),
                     static_cast<size_t>(object - objects.begin())});
  }
}

py::list find_names(const py::list& dictionaries, const py::list& objects) {
  std::vector<PyObject*> wanted;
  for (const py::handle object : objects) wanted.push_back(object.ptr());
  std::vector<Name> found;
  for (const py::handle one : dictionaries) {
    if (PyDict_CheckExact(one.ptr())) find_names_in(one.ptr(), wanted, found);
  }
  py::list result;
  for (const Name& one : found) result.append(py::make_tuple(one.dictionary, one.name, one.place));
  return result;
}

}  // namespace

void bind_names(py::module_& module) {
  module.def("find_names", &find_names, py::arg("dictionaries"), py::arg("objects"));
}

}  // namespace gdsdata
