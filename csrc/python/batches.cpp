#include "python/batches.h"

#include <pybind11/stl.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/cufile_api.h"
#include "engine/engine.h"
#include "engine/prefetcher.h"
#include "python/dlpack.h"
#include "python/gil.h"
#include "python/lease.h"
#include "python/samples.h"
#include "python/values.h"

namespace py = pybind11;

namespace gdsdata {

namespace {

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
    options.stall_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(duration_of(stall_timeout_s));
    prefetcher_ = std::make_unique<Prefetcher>(std::move(engine), std::move(files), std::move(pool), options,
                                               std::move(residence));
  }
  ~Batches() {
    const WithoutGil nogil;  // joins a thread, and may destroy the residence, which waits for its gathers
    prefetcher_.reset();
  }
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  void plan(const Array<int32_t>& files, const Array<int64_t>& offsets, const Array<int64_t>& sizes) {
    const WithoutGil nogil;
    prefetcher_->plan(span_of(files), span_of(offsets), span_of(sizes));
  }

  // See PlannedBatches. The arguments are those of `permute` and `locate`.
  void set_order(uint64_t n, uint64_t a, uint64_t b, const Array<uint64_t>& keys, const Array<int64_t>& first_sample,
                 const Array<int64_t>& base_bytes, const Array<int64_t>& stride_bytes) {
    prefetcher_->set_order({permutation_of(n, a, b, keys), samples_of_files(first_sample, base_bytes, stride_bytes)});
    order_ = {keys, first_sample, base_bytes, stride_bytes};
  }
  void plan_runs(const Array<int64_t>& begins, const Array<int64_t>& lengths, const Array<int64_t>& sizes) {
    const WithoutGil nogil;
    prefetcher_->plan_runs(span_of(begins), span_of(lengths), span_of(sizes));
  }

  // `stream`: the consumer's, which waits for the batch's copies and then uses the batch.
  py::object next(uintptr_t stream) {
    std::optional<Prefetcher::Batch> batch;
    const Inside inside(inside_next_);
    const BesideCaptures beside_captures(*device_);
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
        if (!copy->done()) consumer->wait(*copy);  // a wait costs microseconds even if it is done
      }
      batch->buffer->uses.clear();
    }
    auto lease = std::make_unique<Lease>(device_, std::move(batch->buffer), std::move(streams), leased_);
    return to_dlpack(layout_, std::move(lease), batch->offset, batch->samples);
  }
  // `stream` has taken a batch; `wait_until_taken` makes another stream wait for that.
  void note_taken(uintptr_t stream) { taken_ = device_->foreign_stream(stream)->record(); }
  void wait_until_taken(uintptr_t stream) {
    if (taken_ != nullptr) device_->foreign_stream(stream)->wait(*taken_);
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
  // Not an event of torch: to free one in a forked child aborts it.
  std::shared_ptr<Event> taken_;
  std::vector<py::object> order_;  // the arrays that the prefetcher reads
  std::unique_ptr<Prefetcher> prefetcher_;
};

}  // namespace

void bind_batches(py::module_& module) {
  py::class_<Residence, std::shared_ptr<Residence>>(module, "Residence")
      .def(py::init([](const Engine& engine, std::shared_ptr<FileTable> files, size_t most_samples) {
             return ends_without_gil(std::make_unique<Residence>(engine.device(), std::move(files), most_samples));
           }),
           py::arg("engine"), py::arg("files"), py::arg("most_samples"))
      .def_property_readonly("ready", &Residence::ready)
      .def_property_readonly("registered_bytes", &Residence::registered_bytes)
      .def_property_readonly("error", [](const Residence& residence) {
        const std::optional<Error> error = residence.error();
        return error ? error->message : std::string();
      });

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
      .def("set_order", &Batches::set_order, py::arg("n"), py::arg("a"), py::arg("b"), py::arg("keys"),
           py::arg("first_sample"), py::arg("base_bytes"), py::arg("stride_bytes"))
      .def("plan_runs", &Batches::plan_runs, py::arg("begins"), py::arg("lengths"), py::arg("sizes"))
      .def("next", &Batches::next, py::arg("stream") = 0)
      .def("note_taken", &Batches::note_taken, py::arg("stream"))
      .def("wait_until_taken", &Batches::wait_until_taken, py::arg("stream"))
      .def_property_readonly("leased", &Batches::leased)
      .def("close", &Batches::close)
      .def_property_readonly("inside_next", &Batches::inside_next)
      .def("statistics", &Batches::statistics);

  // The address is only compared with those of leases.
  module.def(
      "record_stream",
      [](uintptr_t address, uintptr_t stream) {
        return Lease::record_stream(reinterpret_cast<std::byte*>(address), stream);
      },
      py::arg("address"), py::arg("stream"));
}

}  // namespace gdsdata
