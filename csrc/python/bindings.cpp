// The extension module gdsdata._engine. gdsdata/io/engine.py is its only user.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "backend/cufile_api.h"
#include "base/crc32.h"
#include "base/fallbacks.h"
#include "base/pickle.h"
#include "device/anonymous_memory.h"
#include "engine/endings.h"
#include "engine/engine.h"
#include "engine/pending.h"
#include "engine/prefetcher.h"
#include "engine/stall_clock.h"
#include "engine/whole.h"
#include "python/buffer.h"
#include "python/dlpack.h"

namespace py = pybind11;
using namespace gdsdata;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

DirectMode direct_mode(const std::string& name) {
  if (name == "auto") return DirectMode::kAuto;
  if (name == "always") return DirectMode::kAlways;
  if (name == "never") return DirectMode::kNever;
  throw py::value_error("direct must be 'auto', 'always' or 'never', not '" + name + "'");
}

Checksum checksum_of(const std::string& name) {
  if (name == "none") return Checksum::kNone;
  if (name == "crc32") return Checksum::kCrc32;
  if (name == "crc32c") return Checksum::kCrc32c;
  throw py::value_error("unknown checksum '" + name + "'");
}

Conversion conversion_of(const std::string& name) {
  static const std::map<std::string, Conversion> kNames = {
      {"none", Conversion::kNone},           {"u8_to_i64", Conversion::kU8ToI64},
      {"u16_to_i64", Conversion::kU16ToI64}, {"i16_to_i64", Conversion::kI16ToI64},
      {"i32_to_i64", Conversion::kI32ToI64}, {"u32_to_i64", Conversion::kU32ToI64},
      {"swap_2", Conversion::kSwap2},        {"swap_4", Conversion::kSwap4},
      {"swap_8", Conversion::kSwap8},
  };
  const auto found = kNames.find(name);
  if (found == kNames.end()) throw py::value_error("unknown conversion '" + name + "'");
  return found->second;
}

void raise(const Error& error) {
  const py::module_ errors = py::module_::import("gdsdata.errors");
  py::object exception;
  switch (error.code) {
    case ErrorCode::kInvalidArgument:
      exception = py::reinterpret_borrow<py::object>(PyExc_ValueError)(error.message);
      break;
    case ErrorCode::kNotFound:
      exception = py::reinterpret_borrow<py::object>(PyExc_FileNotFoundError)(error.system_errno, error.message);
      exception.attr("path") = error.path;
      break;
    case ErrorCode::kUnavailable:
      exception = errors.attr("BackendUnavailable")(error.message, py::make_tuple(error.message));
      break;
    case ErrorCode::kIo:
      exception = errors.attr("IoError")(error.system_errno, error.message, error.path, error.offset, error.length);
      break;
    case ErrorCode::kNotReplaceable:
      exception = errors.attr("NotReplaceable")(error.system_errno, error.message, error.path);
      break;
    case ErrorCode::kCorrupt:
      exception = errors.attr("CorruptData")(error.message, error.path, error.offset, error.length);
      break;
    case ErrorCode::kDevice:
      exception = errors.attr("DeviceError")(error.message);
      break;
    case ErrorCode::kStalled:
      exception = errors.attr("StallError")(error.message);
      break;
    case ErrorCode::kClosed:
      exception = errors.attr("EngineClosed")(error.message);
      break;
  }
  PyErr_SetObject(py::type::of(exception).ptr(), exception.ptr());
}

// Once the interpreter ends, a thread that asks for the GIL is ended in the middle of our frames. So calls that wait
// are told to come back before, and one that has not come back then stays where it is.
std::atomic<bool> ending{false}, ended{false};
std::atomic<int> waiting_calls{0};

// The GIL let go for the time of a call that waits. What the interpreter frees in its end keeps it.
class WithoutGil {
 public:
  WithoutGil() {
    if (ended) return;
    ++waiting_calls;
    state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_ == nullptr) return;
    while (ended) ::pause();
    PyEval_RestoreThread(state_);
    --waiting_calls;
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// For what waits in its end, for threads or for the device: whoever has it last may have the GIL.
template <typename T>
std::shared_ptr<T> ends_without_gil(std::unique_ptr<T> instance) {
  return {instance.release(), [](T* last) {
            std::optional<WithoutGil> nogil;
            if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) nogil.emplace();
            delete last;
          }};
}

// Between waits: lets Ctrl-C through.
void check_signals() {
  if (ending) throw Failure({ErrorCode::kClosed, "the interpreter ends, and this call with it"});
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

py::dict by_route(const RouteBytes& bytes) {
  py::dict result;
  for (size_t i = 0; i < kRouteCount; ++i) result[kRouteNames[i]] = bytes.bytes[i];
  return result;
}

py::dict to_dict(const LatencySummary& latency) {
  py::dict result;
  result["count"] = latency.count;
  result["p50_us"] = latency.p50_us;
  result["p90_us"] = latency.p90_us;
  result["p99_us"] = latency.p99_us;
  result["p999_us"] = latency.p999_us;
  return result;
}

py::dict to_dict(const EngineStatistics& statistics) {
  py::dict result;
  result["bytes"] = by_route(statistics.bytes);
  result["storage_bytes"] = statistics.storage_bytes;
  result["transfers"] = statistics.transfers;
  result["requests"] = statistics.requests;
  result["segments"] = statistics.segments;
  result["errors"] = statistics.errors;
  result["retries"] = statistics.retries;
  result["worker_idle_s"] = statistics.worker_idle_s;
  result["worker_active_s"] = statistics.worker_active_s;
  result["worker_storage_s"] = statistics.worker_storage_s;
  result["worker_link_s"] = statistics.worker_link_s;
  result["worker_device_s"] = statistics.worker_device_s;
  result["segment_latency"] = to_dict(statistics.segment_latency);
  return result;
}

py::dict to_dict(const PrefetchStatistics& statistics) {
  py::dict result;
  result["bytes"] = by_route(statistics.bytes);
  result["batches"] = statistics.batches;
  result["stalls"] = statistics.stalls;
  result["stall_s"] = statistics.stall_s;
  result["ring_full_s"] = statistics.ring_full_s;
  result["mean_ready"] = statistics.mean_ready;
  return result;
}

// Of each worker its spans (what, begin and end in ns, bytes), and how many there were besides.
py::list to_list(const std::vector<Spans>& of_workers) {
  py::list result;
  for (const Spans& of_worker : of_workers) {
    py::list spans;
    for (const Span& span : of_worker.spans) {
      spans.append(py::make_tuple(kWorkNames[static_cast<size_t>(span.work)], span.begin_ns, span.end_ns, span.bytes));
    }
    result.append(py::make_tuple(spans, of_worker.dropped));
  }
  return result;
}

// -1: the processor, else a CUDA device.
std::shared_ptr<Device> device_of(int cuda_ordinal) {
  return cuda_ordinal < 0 ? host_device() : cuda_device(cuda_ordinal);
}

std::shared_ptr<Engine> make_engine(int cuda_ordinal, const std::string& backend, size_t workers, size_t queue_depth,
                                    uint64_t segment_bytes, uint64_t request_bytes, uint64_t bounce_bytes,
                                    uint64_t staging_bytes, uint64_t coalesce_gap_bytes, const std::string& direct,
                                    bool strict, bool cufile_batch, const std::string& faults) {
  EngineOptions options;
  options.backend = backend;
  options.workers = workers;
  options.segment_bytes = segment_bytes;
  options.staging_bytes = staging_bytes;
  options.coalesce_gap_bytes = coalesce_gap_bytes;
  options.io = {queue_depth, bounce_bytes, request_bytes, direct_mode(direct), strict, cufile_batch, faults};
  // Its end may wait half a second, with the GIL kept: a thread that let it go while the interpreter ends could
  // not take it again.
  return ends_without_gil(std::make_unique<Engine>(options, device_of(cuda_ordinal)));
}

std::shared_ptr<FileTable> make_file_table(const std::vector<std::string>& paths, const Array<int64_t>& size_bytes,
                                           const Array<int64_t>& mtime_ns, std::vector<std::shared_ptr<File>> opened) {
  if (static_cast<size_t>(size_bytes.size()) != paths.size() || size_bytes.size() != mtime_ns.size()) {
    throw py::value_error("a file table needs a size and a modification time for each path");
  }
  std::vector<FileIdentity> identities;
  for (size_t i = 0; i < paths.size(); ++i) {
    identities.push_back({static_cast<uint64_t>(size_bytes.data()[i]), mtime_ns.data()[i]});
  }
  return std::make_shared<FileTable>(paths, std::move(identities), std::move(opened));
}

// A prefetcher and how its batches become tensors.
class Batches {
 public:
  Batches(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files, std::shared_ptr<BufferPool> pool,
          size_t slots, uint64_t sample_bytes, size_t batch_samples, const std::string& conversion,
          const std::tuple<uint8_t, uint8_t, uint16_t>& type, std::vector<int64_t> sample_shape,
          std::vector<int64_t> sample_strides, double stall_timeout_s, std::shared_ptr<Residence> residence)
      : device_(engine->device()),
        layout_{std::make_from_tuple<DLDataType>(type),
                std::move(sample_shape),
                std::move(sample_strides),
                1,
                {kDLCPU, 0}} {
    if (!device_->host_addressable()) layout_.device = {kDLCUDA, device_->ordinal()};
    for (const int64_t size : layout_.sample_shape) layout_.sample_elements *= size;
    PrefetchOptions options;
    options.slots = slots;
    options.sample_bytes = sample_bytes;
    options.batch_samples = batch_samples;
    options.conversion = conversion_of(conversion);
    options.stall_timeout = std::chrono::milliseconds(static_cast<int64_t>(stall_timeout_s * 1000));
    prefetcher_ = std::make_unique<Prefetcher>(std::move(engine), std::move(files), std::move(pool), options,
                                               std::move(residence));
  }
  ~Batches() {
    const WithoutGil nogil;  // a residence's last kernels are waited for
    prefetcher_.reset();
  }
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  void plan(const Array<int32_t>& files, const Array<int64_t>& offsets, const Array<int64_t>& sizes) {
    const WithoutGil nogil;
    prefetcher_->plan(span_of(files), span_of(offsets), span_of(sizes));
  }

  // `stream`: the consumer's, which waits for the batch's copies in the host's stead, and uses it.
  py::object next(uintptr_t stream) {
    std::optional<Prefetcher::Batch> batch;
    const Inside inside(inside_next_);
    {
      const WithoutGil nogil;
      batch = prefetcher_->next(check_signals);
    }
    if (!batch) return py::none();
    std::vector<uintptr_t> streams;
    if (!device_->host_addressable()) {
      streams.push_back(stream);
      const auto consumer = device_->foreign_stream(stream);
      batch->buffer->uses = batch->copies;  // in case of an error below
      for (const auto& copy : batch->copies) {
        if (!copy->done()) consumer->wait(*copy);  // which takes the device microseconds, were it done already
      }
      batch->buffer->uses.clear();
    }
    auto lease = std::make_unique<Lease>(device_, std::move(batch->buffer), std::move(streams), leased_);
    return to_dlpack(layout_, std::move(lease), batch->offset, batch->samples);
  }
  size_t leased() const { return *leased_; }

  void close() {
    const WithoutGil nogil;
    prefetcher_->close();
  }

  py::dict statistics() const { return to_dict(prefetcher_->statistics()); }
  int inside_next() const { return inside_next_; }

 private:
  struct Inside {
    explicit Inside(std::atomic<int>& count) : count(count) { ++count; }
    ~Inside() { --count; }
    std::atomic<int>& count;
  };
  std::atomic<int> inside_next_{0};  // threads
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<std::atomic<size_t>> leased_ = std::make_shared<std::atomic<size_t>>(0);  // batches
  TensorLayout layout_;
  std::unique_ptr<Prefetcher> prefetcher_;
};

// What a stream has been given until now; nothing for the processor's memory.
struct Mark {
  Events events;
};

Mark mark(const Engine& engine, uintptr_t stream) {
  if (engine.device()->host_addressable()) return {};
  return {{engine.device()->foreign_stream(stream)->record()}};
}

std::chrono::nanoseconds duration_of(double seconds) {
  constexpr double kLongest = 1e9;  // of what a duration holds
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, kLongest) * 1e9));
}

Caller caller_of(std::byte* memory, const Mark& before, bool background, double stall_timeout_s = 0) {
  return {memory, before.events, background ? Priority::kBackground : Priority::kTraining, check_signals,
          duration_of(stall_timeout_s)};
}

// Makes a call that waits, without the GIL. If it stalls, storage may still touch its `memory`, which is then never
// freed.
template <typename Call>
auto waiting(py::object memory, const Call& call) {
  try {
    const WithoutGil nogil;
    return call();
  } catch (const Failure& failure) {
    if (failure.error().code == ErrorCode::kStalled) memory.release();
    throw;
  }
}

Array<uint32_t> array_of(const std::vector<uint32_t>& values) {
  return Array<uint32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

// A read on its way. Keeps `memory`, an object of Python's, until nothing is written there any more.
class BegunRead {
 public:
  BegunRead(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, py::object memory,
            std::function<void()> on_end = {})
      : engine_(std::move(engine)),
        pending_(*engine_, std::move(group), std::move(on_end)),
        memory_(std::move(memory)) {}
  ~BegunRead() { let_go(kPatience); }
  BegunRead(const BegunRead&) = delete;
  BegunRead& operator=(const BegunRead&) = delete;

  bool ended() const { return pending_.ended(); }

  // Whether it has ended within so long.
  bool wait(double seconds) { return finished_ || finished_within(duration_of(seconds), check_signals); }

  uint64_t progress() const { return engine_->progress_of(pending_.group()); }

  // Of one that has ended.
  py::dict routes() const {
    if (error_) throw Failure(*error_);
    return by_route(pending_.group().result().bytes);
  }

  // The same, if checksums were asked for: one of each transfer.
  Array<uint32_t> checksums() const {
    if (error_) throw Failure(*error_);
    return array_of(pending_.group().checksums());
  }

  void cancel() { pending_.cancel(); }
  void let_go() { let_go(std::chrono::milliseconds(0)); }

 private:
  static constexpr std::chrono::milliseconds kPatience{500};

  bool finished_within(std::chrono::nanoseconds patience, const Poll& poll) {
    std::optional<Error> error;
    {
      const WithoutGil nogil;
      if (!pending_.wait(patience, poll)) return false;
      try {
        pending_.finish();
      } catch (const Failure& failure) {
        error = failure.error();
      }
    }
    error_ = std::move(error);
    finished_ = true;
    memory_ = {};
    return true;
  }

  // What storage does not give back for so long keeps its memory for ever. So does a forked child, where nothing ends.
  void let_go(std::chrono::nanoseconds patience) {
    if (finished_) return;
    pending_.cancel();
    if (engine_->forked() || !finished_within(patience, {})) memory_.release();
    finished_ = true;
  }

  const std::shared_ptr<Engine> engine_;
  Pending pending_;
  py::object memory_;
  bool finished_ = false;
  std::optional<Error> error_;
};

// Fills `memory` from the only one of `files`; `endings` returns `number` once the read has ended.
std::unique_ptr<BegunRead> begin_range(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files,
                                       uint64_t offset, py::object memory, const Mark& before, bool background,
                                       Endings& endings, int64_t number) {
  const Buffer buffer = buffer_of(memory, Access::kWrite);
  auto group = group_of_reads(std::move(files), {{0, offset, buffer.bytes, buffer.begin}},
                              caller_of(nullptr, before, background));
  auto on_end = endings.expect(number);
  try {
    return std::make_unique<BegunRead>(std::move(engine), std::move(group), std::move(memory), std::move(on_end));
  } catch (...) {
    endings.not_begun();
    throw;
  }
}

}  // namespace

PYBIND11_MODULE(_engine, module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
      raise(failure.error());
    }
  });

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("cuda_ordinal"), py::arg("backend"), py::arg("workers"),
           py::arg("queue_depth"), py::arg("segment_bytes"), py::arg("request_bytes"), py::arg("bounce_bytes"),
           py::arg("staging_bytes"), py::arg("coalesce_gap_bytes"), py::arg("direct"), py::arg("strict"),
           py::arg("cufile_batch"), py::arg("faults"))
      .def_property_readonly("backend", [](const Engine& engine) { return engine.selection().name; })
      .def_property_readonly("device_backend", [](const Engine& engine) { return engine.selection().device_backend; })
      .def_property_readonly("fallback_reason", [](const Engine& engine) { return engine.selection().reason; })
      .def_property_readonly("workers", [](const Engine& engine) { return engine.options().workers; })
      .def_property_readonly("queue_depth", [](const Engine& engine) { return engine.options().io.queue_depth; })
      .def_property_readonly("segment_bytes", [](const Engine& engine) { return engine.options().segment_bytes; })
      .def_property_readonly("bounce_bytes", &Engine::bounce_bytes)
      .def_property_readonly("forked", &Engine::forked)
      .def("statistics", [](const Engine& engine) { return to_dict(engine.statistics()); })
      .def("begin_spans", &Engine::begin_spans, py::arg("most_a_worker"))
      .def("end_spans", [](Engine& engine) { return to_list(engine.end_spans()); })
      .def("mark", &mark, py::arg("stream"))
      .def("prepare", &Engine::prepare)
      .def(
          "read",
          [](Engine& engine, const std::string& path, uint64_t offset, py::object memory, const Mark& before,
             bool background, double stall_timeout_s) {
            const Buffer buffer = buffer_of(memory, Access::kWrite);
            waiting(std::move(memory), [&] {
              read_range(engine, path, offset, buffer.bytes,
                         caller_of(buffer.begin, before, background, stall_timeout_s));
            });
          },
          py::arg("path"), py::arg("offset"), py::arg("memory"), py::arg("before"), py::arg("background"),
          py::arg("stall_timeout_s") = 0)
      .def(
          "read_many",
          [](Engine& engine, std::shared_ptr<FileTable> files, const Array<int32_t>& file, const Array<int64_t>& offset,
             const Array<int64_t>& length, py::object memory, const Array<int64_t>& place, bool with_checksums,
             const Mark& before, bool background, double stall_timeout_s) {
            std::vector<Transfer> transfers =
                transfers_of(files->size(), {file, offset, length, place}, memory, Access::kWrite);
            const Moved moved = waiting(std::move(memory), [&] {
              return read_many(engine, std::move(files), std::move(transfers), with_checksums,
                               caller_of(nullptr, before, background, stall_timeout_s));
            });
            return std::make_pair(array_of(moved.checksums), by_route(moved.bytes));
          },
          py::arg("files"), py::arg("file"), py::arg("offset"), py::arg("length"), py::arg("memory"), py::arg("place"),
          py::arg("with_checksums"), py::arg("before"), py::arg("background"), py::arg("stall_timeout_s") = 0)
      .def(
          "begin_read",
          [](std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files, const Array<int32_t>& file,
             const Array<int64_t>& offset, const Array<int64_t>& length, py::object memory, const Array<int64_t>& place,
             const Mark& before, const std::string& conversion, const std::string& checksum) {
            std::vector<Transfer> transfers = transfers_of(files->size(), {file, offset, length, place}, memory,
                                                           Access::kWrite, conversion_of(conversion));
            Caller caller = caller_of(nullptr, before, /*background=*/false);
            auto group = group_of_reads(std::move(files), std::move(transfers), caller);
            group->edit().conversion = conversion_of(conversion);
            group->edit().checksum = checksum_of(checksum);
            return std::make_unique<BegunRead>(std::move(engine), std::move(group), std::move(memory));
          },
          py::arg("files"), py::arg("file"), py::arg("offset"), py::arg("length"), py::arg("memory"), py::arg("place"),
          py::arg("before"), py::arg("conversion") = "none", py::arg("checksum") = "none")
      .def("begin_range", &begin_range, py::arg("files"), py::arg("offset"), py::arg("memory"), py::arg("before"),
           py::arg("background"), py::arg("endings"), py::arg("number"))
      .def(
          "write_range",
          [](Engine& engine, const std::string& path, uint64_t offset, py::object memory, const Mark& before,
             bool background, double stall_timeout_s) {
            const Buffer buffer = buffer_of(memory, Access::kRead);
            waiting(std::move(memory), [&] {
              write_range(engine, path, offset, buffer.bytes,
                          caller_of(buffer.begin, before, background, stall_timeout_s));
            });
          },
          py::arg("path"), py::arg("offset"), py::arg("memory"), py::arg("before"), py::arg("background"),
          py::arg("stall_timeout_s") = 0)
      .def(
          "write_whole",
          [](Engine& engine, const std::string& path, py::object memory, const Mark& before, bool background,
             double stall_timeout_s) {
            const Buffer buffer = buffer_of(memory, Access::kRead);
            waiting(std::move(memory), [&] {
              write_whole(engine, path, buffer.bytes, caller_of(buffer.begin, before, background, stall_timeout_s));
            });
          },
          py::arg("path"), py::arg("memory"), py::arg("before"), py::arg("background"), py::arg("stall_timeout_s") = 0);

  py::class_<Mark>(module, "Mark");

  py::class_<Endings>(module, "Endings")
      .def(py::init<std::shared_ptr<Engine>>())
      .def("take",
           [](Endings& endings) {
             const WithoutGil nogil;
             return endings.take([] { return ending.load(); });
           })
      .def("begin_waiting", &Endings::begin_waiting, py::arg("number"))
      .def("end_waiting", &Endings::end_waiting, py::arg("number"), py::arg("has_seen_it"))
      .def("close", &Endings::close);

  py::class_<BegunRead>(module, "BegunRead")
      .def("ended", &BegunRead::ended)
      .def("wait", &BegunRead::wait, py::arg("seconds"))
      .def("progress", &BegunRead::progress)
      .def("routes", &BegunRead::routes)
      .def("checksums", &BegunRead::checksums)
      .def("cancel", &BegunRead::cancel)
      .def("let_go", py::overload_cast<>(&BegunRead::let_go));

  py::class_<Output>(module, "Output")
      .def(py::init([](const std::string& path, uint64_t length) {
             const WithoutGil nogil;
             return std::make_unique<Output>(path, length);
           }),
           py::arg("path"), py::arg("length"))
      .def(
          "write",
          [](Output& output, Engine& engine, const Array<int64_t>& offset, const Array<int64_t>& length,
             py::object memory, const Array<int64_t>& place, bool with_checksums, const Mark& before, bool background,
             double stall_timeout_s) {
            std::vector<Transfer> transfers =
                transfers_of(1, {Array<int32_t>(), offset, length, place}, memory, Access::kRead);
            return array_of(waiting(std::move(memory), [&] {
              return output.write(engine, std::move(transfers), with_checksums,
                                  caller_of(nullptr, before, background, stall_timeout_s));
            }));
          },
          py::arg("engine"), py::arg("offset"), py::arg("length"), py::arg("memory"), py::arg("place"),
          py::arg("with_checksums"), py::arg("before"), py::arg("background"), py::arg("stall_timeout_s") = 0)
      .def("commit", [](Output& output) {
        const WithoutGil nogil;
        output.commit();
      });

  py::class_<Residence, std::shared_ptr<Residence>>(module, "Residence")
      .def(py::init([](const Engine& engine, std::shared_ptr<FileTable> files) {
             return ends_without_gil(std::make_unique<Residence>(engine.device(), std::move(files)));
           }),
           py::arg("engine"), py::arg("files"))
      .def_property_readonly("ready", &Residence::ready)
      .def_property_readonly("registered_bytes", &Residence::registered_bytes)
      .def_property_readonly("error", [](const Residence& residence) {
        const std::optional<Error> error = residence.error();
        return error ? error->message : std::string();
      });

  py::class_<File, std::shared_ptr<File>>(module, "File")
      .def(py::init([](const std::string& path) { return File::open_for_reading(path); }))
      .def_property_readonly("descriptor", &File::buffered);

  module.attr("ANY_TIME") = FileIdentity::kAnyTime;
  py::class_<FileTable, std::shared_ptr<FileTable>>(module, "FileTable")
      .def(py::init(&make_file_table), py::arg("paths"), py::arg("size_bytes"), py::arg("mtime_ns"),
           py::arg("opened") = std::vector<std::shared_ptr<File>>())
      .def(py::init([](const std::string& path) {  // whatever it is when it is opened
        return std::make_shared<FileTable>(std::vector{path}, std::vector<FileIdentity>());
      }));

  py::class_<BufferPool, std::shared_ptr<BufferPool>>(module, "BufferPool")
      .def(py::init([](const Engine& engine, size_t batch_bytes, size_t max_kept) {
             BufferPool::Announce announce;
             if (const std::string& backend = engine.selection().device_backend; !backend.empty()) {
               announce = [backend, device = engine.device()](std::span<std::byte> memory) {
                 return announce_memory(backend, device, memory);
               };
             }
             return ends_without_gil(std::make_unique<BufferPool>(
                 engine.device(), batch_bytes + Prefetcher::kPlacementBytes, max_kept, std::move(announce)));
           }),
           py::arg("engine"), py::arg("batch_bytes"), py::arg("max_kept"))
      .def_property_readonly("max_kept_bytes", &BufferPool::max_kept_bytes);

  py::class_<Batches>(module, "Batches")
      .def(py::init<std::shared_ptr<Engine>, std::shared_ptr<FileTable>, std::shared_ptr<BufferPool>, size_t, uint64_t,
                    size_t, const std::string&, const std::tuple<uint8_t, uint8_t, uint16_t>&, std::vector<int64_t>,
                    std::vector<int64_t>, double, std::shared_ptr<Residence>>(),
           py::arg("engine"), py::arg("files"), py::arg("pool"), py::kw_only(), py::arg("slots"),
           py::arg("sample_bytes"), py::arg("batch_samples"), py::arg("conversion"), py::arg("type"),
           py::arg("sample_shape"), py::arg("sample_strides"), py::arg("stall_timeout_s"), py::arg("residence"))
      .def("plan", &Batches::plan, py::arg("files"), py::arg("offsets"), py::arg("sizes"))
      .def("next", &Batches::next, py::arg("stream") = 0)
      .def_property_readonly("leased", &Batches::leased)
      .def("close", &Batches::close)
      .def_property_readonly("inside_next", &Batches::inside_next)
      .def("statistics", &Batches::statistics);

  module.def(
      "pickle_claims_too_much",
      [](const py::bytes& pickle) {
        const std::string_view bytes = pickle;
        return pickle_claims_too_much({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
      },
      py::arg("pickle"));
  module.def("crc32_joined", &crc32_joined, py::arg("of_first"), py::arg("of_second"), py::arg("second_length"));
  module.attr("ROUTES") = py::cast(kRouteNames).cast<py::tuple>();
  module.def(
      "read_each",
      [](int descriptor, const std::string& path, const Array<int64_t>& offset, size_t length) {
        Array<uint8_t> found(static_cast<py::ssize_t>(static_cast<size_t>(offset.size()) * length));
        auto* const out = reinterpret_cast<std::byte*>(found.mutable_data());
        const WithoutGil nogil;
        read_each(descriptor, path, span_of(offset), length, out);
        return found;
      },
      py::arg("descriptor"), py::arg("path"), py::arg("offset"), py::arg("length"));
  module.def(
      "prefer_huge_pages",
      [](py::object memory) {
        const Buffer buffer = buffer_of(memory, Access::kWrite);
        prefer_huge_pages(buffer.begin, buffer.bytes);
      },
      py::arg("memory"));
  module.def("direct_refusals", &direct_refusals);
  module.def("set_cufile_search_path", &set_cufile_search_path);
  module.def("cufile_dma_is_possible", &cufile_dma_is_possible);
  module.def("noted_fallbacks", &noted_fallbacks);
  module.def("stop_cufile_statistics", &stop_cufile_statistics);
  module.def("begin_exit", [] { ending = true; });
  module.def("waiting_calls", [] { return waiting_calls.load(); });
  module.def("end_exit", [] { ended = true; });
  // The address is only compared with those of leases.
  module.def(
      "record_stream",
      [](uintptr_t address, uintptr_t stream) {
        return Lease::record_stream(reinterpret_cast<std::byte*>(address), stream);
      },
      py::arg("address"), py::arg("stream"));
}
