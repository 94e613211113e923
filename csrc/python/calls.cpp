#include "python/calls.h"

#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/endings.h"
#include "engine/engine.h"
#include "engine/pending.h"
#include "engine/stall_clock.h"
#include "engine/whole.h"
#include "python/buffer.h"
#include "python/gil.h"
#include "python/path.h"
#include "python/values.h"
#include "tuning.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

// -1 means the processor, other values a CUDA device.
std::shared_ptr<Device> device_of(int cuda_ordinal) {
  return cuda_ordinal < 0 ? host_device() : cuda_device(cuda_ordinal);
}

std::shared_ptr<Engine> make_engine(int cuda_ordinal, const std::string& backend, size_t workers, size_t cores,
                                    size_t queue_depth, uint64_t segment_bytes, uint64_t request_bytes,
                                    uint64_t bounce_bytes, uint64_t staging_bytes, uint64_t coalesce_gap_bytes,
                                    const std::string& direct, bool strict, bool cufile_batch,
                                    const std::string& faults) {
  EngineOptions options;
  options.backend = backend;
  options.workers = workers;
  options.cores = cores;
  options.segment_bytes = segment_bytes;
  options.staging_bytes = staging_bytes;
  options.coalesce_gap_bytes = coalesce_gap_bytes;
  options.io = {queue_depth, bounce_bytes, request_bytes, direct_mode(direct), strict, cufile_batch, faults};
  // Destroying the engine may wait 0.5 s. At the interpreter's end the GIL is kept, because a
  // thread could not acquire it again.
  return ends_without_gil(std::make_unique<Engine>(options, device_of(cuda_ordinal)));
}

// Events of all work in a stream so far. Empty for the processor's memory.
struct Mark {
  Events events;
};

Mark mark(const Engine& engine, uintptr_t stream) {
  if (engine.device()->host_addressable()) return {};
  return {{engine.device()->foreign_stream(stream)->record()}};
}

Caller caller_of(std::byte* memory, const Mark& before, bool background, double stall_timeout_s = 0) {
  return {memory, before.events, background ? Priority::kBackground : Priority::kTraining, check_signals,
          duration_of(stall_timeout_s)};
}

// Ends calls that wait in several threads. Ctrl-C in one of them ends all.
class Stop {
 public:
  void request() { requested_ = true; }
  // A poll, as check_signals is.
  void check() {
    try {
      check_signals();
    } catch (...) {
      request();
      throw;
    }
    if (requested_) throw Failure({ErrorCode::kClosed, "the call was stopped by another thread"});
  }

 private:
  std::atomic<bool> requested_{false};
};

// Runs a call that waits, without the GIL. If it stalls, storage may still access `memory`, which
// is then never freed.
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

// A read in flight. Keeps `memory`, a Python object, until nothing writes to it any more.
class BegunRead {
 public:
  BegunRead(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, py::object memory,
            std::function<void()> on_end = {}, bool is_served_at_once = false)
      : engine_(std::move(engine)),
        pending_(*engine_, std::move(group), std::move(on_end), /*waits_now=*/is_served_at_once),
        memory_(std::move(memory)) {}
  ~BegunRead() { abandon(interpreter_end.begun ? std::chrono::milliseconds(0) : kPatience); }
  BegunRead(const BegunRead&) = delete;
  BegunRead& operator=(const BegunRead&) = delete;

  bool ended() const { return pending_.ended(); }

  // Waits for at most so long. Returns whether it has ended.
  bool wait(double seconds) { return finished_ || finished_within(duration_of(seconds), check_signals); }

  // Call it once if `is_served_at_once`. Returns whether the read is finished.
  bool serve_at_once() noexcept {
    {
      const WithoutGil nogil;
      engine_->serve_at_once(pending_.group());
    }
    return pending_.complete() && wait(0);
  }
  bool finished() const { return finished_; }

  uint64_t progress() const { return engine_->progress_of(pending_.group()); }

  // Call these after the end. They throw the read's error.
  void check() const {
    if (error_) throw Failure(*error_);
  }
  py::dict routes() const {
    check();
    return by_route(pending_.group().result().bytes);
  }

  // One for each transfer, if they were requested.
  Array<uint32_t> checksums() const {
    check();
    return array_of(pending_.group().checksums());
  }

  void cancel() { pending_.cancel(); }
  void abandon() { abandon(std::chrono::milliseconds(0)); }

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

  // If storage still uses the memory after `patience`, the memory is never freed. The same holds in
  // a forked child, where no read ends, and if an exception (no memory) keeps this from knowing.
  void abandon(std::chrono::nanoseconds patience) noexcept {
    if (finished_) return;
    try {
      pending_.cancel();
      if (!engine_->forked()) finished_within(patience, {});
    } catch (...) {
    }
    if (!std::exchange(finished_, true)) memory_.release();
  }

  const std::shared_ptr<Engine> engine_;
  Pending pending_;
  py::object memory_;
  bool finished_ = false;
  std::optional<Error> error_;
};

// While it exists, the end of this read wakes no thread that waits in Endings::take.
class WaitingHere {
 public:
  WaitingHere(Endings& endings, int64_t number) : endings_(endings), number_(number) { endings.begin_waiting(number); }
  ~WaitingHere() { endings_.end_waiting(number_, has_seen_it); }
  WaitingHere(const WaitingHere&) = delete;
  WaitingHere& operator=(const WaitingHere&) = delete;
  bool has_seen_it = false;

 private:
  Endings& endings_;
  const int64_t number_;
};

// Fills `memory` from the only file of `files`. `endings` returns `number` when the read has ended.
// With `at_once`, a few bytes of the page cache are copied here; the read may be finished then.
std::unique_ptr<BegunRead> begin_range(std::shared_ptr<Engine> engine, std::shared_ptr<FileTable> files,
                                       uint64_t offset, py::object memory, const Mark& before, bool background,
                                       bool at_once, Endings& endings, int64_t number) {
  const Buffer buffer = buffer_of(memory, Access::kWrite);
  std::optional<WaitingHere> waiting;
  if (at_once && buffer.bytes <= tuning::kAtOnceBytes && !files->has_remote()) waiting.emplace(endings, number);
  auto group = group_of_reads(std::move(files), {{0, offset, buffer.bytes, buffer.begin}},
                              caller_of(nullptr, before, background));
  auto on_end = endings.expect(number);
  std::unique_ptr<BegunRead> begun;
  try {
    begun = std::make_unique<BegunRead>(std::move(engine), std::move(group), std::move(memory), std::move(on_end),
                                        waiting.has_value());
  } catch (...) {
    endings.not_begun();
    throw;
  }
  if (waiting) waiting->has_seen_it = begun->serve_at_once();
  return begun;
}

}  // namespace

void bind_calls(py::module_& module) {
  py::class_<Stop, std::shared_ptr<Stop>>(module, "Stop").def(py::init()).def("request", &Stop::request);

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("cuda_ordinal"), py::arg("backend"), py::arg("workers"),
           py::arg("cores"), py::arg("queue_depth"), py::arg("segment_bytes"), py::arg("request_bytes"),
           py::arg("bounce_bytes"), py::arg("staging_bytes"), py::arg("coalesce_gap_bytes"), py::arg("direct"),
           py::arg("strict"), py::arg("cufile_batch"), py::arg("faults"))
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
          [](Engine& engine, const Path& path, uint64_t offset, py::object memory, const Mark& before, bool background,
             double stall_timeout_s) {
            const Buffer buffer = buffer_of(memory, Access::kWrite);
            waiting(std::move(memory), [&] {
              read_range(engine, path.bytes, offset, buffer.bytes,
                         caller_of(buffer.begin, before, background, stall_timeout_s));
            });
          },
          py::arg("path"), py::arg("offset"), py::arg("memory"), py::arg("before"), py::arg("background"),
          py::arg("stall_timeout_s") = 0)
      .def(
          "read_many",
          [](Engine& engine, std::shared_ptr<FileTable> files, const Array<int32_t>& file, const Array<int64_t>& offset,
             const Array<int64_t>& length, py::object memory, const Array<int64_t>& place, bool with_checksums,
             const Mark& before, bool background, double stall_timeout_s, const std::string& conversion,
             const std::shared_ptr<Stop>& stop) {
            std::vector<Transfer> transfers = transfers_of(files->size(), {file, offset, length, place}, memory,
                                                           Access::kWrite, conversion_of(conversion));
            Caller caller = caller_of(nullptr, before, background, stall_timeout_s);
            if (stop) caller.poll = [stop] { stop->check(); };
            const Moved moved = waiting(std::move(memory), [&] {
              return read_many(engine, std::move(files), std::move(transfers), conversion_of(conversion),
                               with_checksums, caller);
            });
            return std::make_pair(array_of(moved.checksums), by_route(moved.bytes));
          },
          py::arg("files"), py::arg("file"), py::arg("offset"), py::arg("length"), py::arg("memory"), py::arg("place"),
          py::arg("with_checksums"), py::arg("before"), py::arg("background"), py::arg("stall_timeout_s") = 0,
          py::arg("conversion") = "none", py::arg("stop") = std::shared_ptr<Stop>())
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
           py::arg("background"), py::arg("at_once"), py::arg("endings"), py::arg("number"))
      .def(
          "write_range",
          [](Engine& engine, const Path& path, uint64_t offset, py::object memory, const Mark& before, bool background,
             double stall_timeout_s) {
            const Buffer buffer = buffer_of(memory, Access::kRead);
            waiting(std::move(memory), [&] {
              write_range(engine, path.bytes, offset, buffer.bytes,
                          caller_of(buffer.begin, before, background, stall_timeout_s));
            });
          },
          py::arg("path"), py::arg("offset"), py::arg("memory"), py::arg("before"), py::arg("background"),
          py::arg("stall_timeout_s") = 0)
      .def(
          "write_whole",
          [](Engine& engine, const Path& path, py::object memory, const Mark& before, bool background,
             double stall_timeout_s) {
            const Buffer buffer = buffer_of(memory, Access::kRead);
            waiting(std::move(memory), [&] {
              write_whole(engine, path.bytes, buffer.bytes,
                          caller_of(buffer.begin, before, background, stall_timeout_s));
            });
          },
          py::arg("path"), py::arg("memory"), py::arg("before"), py::arg("background"), py::arg("stall_timeout_s") = 0);

  py::class_<Mark>(module, "Mark");

  py::class_<Endings>(module, "Endings")
      .def(py::init<std::shared_ptr<Engine>>())
      .def("take",
           [](Endings& endings) {
             const WithoutGil nogil;
             return endings.take([] { return interpreter_end.begun.load(); });
           })
      .def("begin_waiting", &Endings::begin_waiting, py::arg("number"))
      .def("end_waiting", &Endings::end_waiting, py::arg("number"), py::arg("has_seen_it"))
      .def("close", &Endings::close);

  py::class_<BegunRead>(module, "BegunRead")
      .def("ended", &BegunRead::ended)
      .def("finished", &BegunRead::finished)
      .def("wait", &BegunRead::wait, py::arg("seconds"))
      .def("progress", &BegunRead::progress)
      .def("check", &BegunRead::check)
      .def("routes", &BegunRead::routes)
      .def("checksums", &BegunRead::checksums)
      .def("cancel", &BegunRead::cancel)
      .def("abandon", py::overload_cast<>(&BegunRead::abandon));

  py::class_<Output>(module, "Output")
      .def(py::init([](const Path& path, uint64_t length) {
             const WithoutGil nogil;
             return std::make_unique<Output>(path.bytes, length);
           }),
           py::arg("path"), py::arg("length"))
      .def(py::init([](int descriptor, const Path& path, uint64_t length) {
             const WithoutGil nogil;
             return std::make_unique<Output>(descriptor, path.bytes, length);
           }),
           py::arg("descriptor"), py::arg("path"), py::arg("length"))
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
}

}  // namespace gdsdata
