// What torch asks of a device in C++, on what order.h, memory.h and pinned.h keep; the kernels are in Python.
#include "pinned.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace strict_device {
// Random numbers: the CPU's generator under another device, so that a seed draws the same numbers on both -----------
struct Random final : at::CPUGeneratorImpl {
  explicit Random(DeviceIndex d) {
    device_ = Device(TYPE, d < 0 ? strict_device::device_ : d);
    key_set_ = c10::DispatchKeySet(KEY);
  }
};
static const at::Generator& default_generator(DeviceIndex d) {
  static std::map<DeviceIndex, at::Generator> all;
  Locked lock(mutex_);
  if (d < 0) d = device_;
  if (!all.count(d)) all[d] = at::make_generator<Random>(d);
  return all[d];
}
// The CPU's kernels draw from the CPU's default generator, which must not move: its state is lent to it and back.
static void swap_random(const at::Generator& other) {
  auto* a = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  auto* b = other.get<at::CPUGeneratorImpl>();
  auto engine = a->engine();
  a->set_engine(b->engine());
  b->set_engine(engine);
  auto single = a->next_float_normal_sample();
  a->set_next_float_normal_sample(b->next_float_normal_sample());
  b->set_next_float_normal_sample(single);
  auto twofold = a->next_double_normal_sample();
  a->set_next_double_normal_sample(b->next_double_normal_sample());
  b->set_next_double_normal_sample(twofold);
}

// Hooks ------------------------------------------------------------------------------------------------------------
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return devices_; }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(Device(TYPE, d)); }
  DeviceIndex getCurrentDevice() const override { return device_; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return Guard().exchangeDevice(Device(TYPE, d)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? device_ : exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator_; }
  bool isPinnedPtr(const void* p) const override { return pinned_.has(p); }
  Device getDeviceFromPtr(void* p) const override {
    auto* b = block_of(p);
    return Device(TYPE, b ? b->device : device_);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Random>(d); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = allocator_.allocate(size);
    if (auto kept = std::min(size, storage.nbytes()))
      std::memcpy(memory_.cpu(fresh.get()), memory_.cpu(storage.data()), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// Operators that touch no element ----------------------------------------------------------------------------------
using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Where = std::optional<Device>;
using Pin = std::optional<bool>;
using Format = std::optional<c10::MemoryFormat>;

static at::Tensor empty(c10::IntArrayRef size, Dtype dtype, Layout, Where device, Pin, Format format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator_, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}
static at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout, Where device, Pin) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  c10::DispatchKeySet keys(KEY);
  return at::detail::empty_strided_generic(size, stride, &allocator_, keys, c10::dtype_or_default(dtype));
}
static at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator_.allocate(0), &allocator_, true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}
static void record_stream(at::Tensor& self, Stream s) { allocator_.recordStream(self.storage().data_ptr(), s); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("alias", at::native::alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_", set_empty);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

// Sparse tensors are made and looked at, as on any backend; there is no arithmetic on them.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", at::native::empty_sparse);
  m.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
}

// Attention as one operator, where the CPU has it so: a GPU does not make the matrix of all scores either.
static int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor&,
                                const std::optional<at::Tensor>& bias, double dropout, bool, std::optional<double>, bool gqa) {
  bool fits = q.dim() == 4 && (gqa || q.size(1) == k.size(1)) && dropout == 0 && !(bias && bias->requires_grad());
  return int64_t(fits ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER) AT_FORALL_FP32(FP32) AT_FORALL_PROMOTE(PROMOTE)
}

// What the kernels in Python need ----------------------------------------------------------------------------------
static at::Tensor cpu_view(const at::Tensor& t) {  // the same elements as a tensor of the CPU
  auto options = t.options().device(at::kCPU);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  auto* first = Bytes::of(t).begin;
  auto& region = pinned_.has(first) ? pinned_ : memory_;
  auto storage = t.storage();  // kept alive by the view
  return at::from_blob(region.cpu(first), t.sizes(), t.strides(), [storage](void*) {}, options);
}
static std::string described(const at::Tensor& t) {
  std::ostringstream words;
  words << t.scalar_type() << t.sizes();
  return words.str();
}
// The CPU's view of a tensor that a call uses, and the earlier access that is in the way, if there is one.
static py::tuple use(const CallPtr& call, const at::Tensor& t, bool write) {
  std::optional<Access> other;
  std::shared_ptr<Owner> owner;
  {
    Locked lock(mutex_);
    auto bytes = Bytes::of(t);
    if (bytes.begin != bytes.end) other = touch(call, bytes, write, described(t));
    if (other) owner = block_of(bytes.begin)->owner;
  }
  // Objects of Python are made without the mutex. Making one may collect garbage, whose finalizers hand the
  // interpreter's lock to a thread that waits for the mutex, and neither thread would go on.
  if (!other) return py::make_tuple(cpu_view(t), py::none());
  auto again = other->owner != owner ? py::make_tuple(other->owner->taken, other->owner->freed, owner->taken) : py::tuple();
  return py::make_tuple(cpu_view(t), py::make_tuple(other->call, other->write, other->what, described(t), again));
}
static at::Tensor adopt(const at::Tensor& made) {  // what a CPU's kernel has made, in memory of the device
  auto t = empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, Device(TYPE, device_), {});
  auto bytes = Bytes::of(made);
  if (made.numel()) std::memcpy(memory_.cpu(t.storage().data()), bytes.begin, bytes.end - bytes.begin);
  return t;
}
static at::Tensor view_like(const at::Tensor& of, const at::Tensor& view) {  // the same part of a tensor of the device
  auto offset = static_cast<char*>(view.data_ptr()) - memory_.cpu(of.storage().data());
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(of.storage()), of.key_set(),
                                                    view.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), offset / int64_t(view.itemsize()));
  return t;
}
static at::Tensor number(const py::object& value) {  // for operators of tensors that Python gives a number
  auto scalar = py::isinstance<py::bool_>(value)  ? at::Scalar(value.cast<bool>())
                : py::isinstance<py::int_>(value) ? at::Scalar(value.cast<int64_t>())
                                                  : at::Scalar(value.cast<double>());
  auto t = c10::scalar_to_tensor(scalar);
  t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}
static void begin(DeviceIndex devices, const std::vector<std::string>& not_programs, const py::object& fault) {
  devices_ = devices;
  not_programs_ = not_programs;
  on_fault_ = new py::object(fault);
  make_default_streams();
  install_handler();
}
static void be_strict(std::optional<size_t> limit, bool as_cuda, double launch) {
  Locked lock(mutex_);
  limit_ = limit.value_or(UNLIMITED);
  as_cuda_ = as_cuda;
  launch_ = launch;
  // Not the whole 64 GiB: a test may limit what a process maps. Freed segments of odd sizes leave holes.
  if (!memory_.user) memory_.size = std::min(UNLIMITED, 8 * limit_ * size_t(devices_));
}
}  // namespace strict_device

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &strict_device::choose_attention);
}
namespace strict_device {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace strict_device;
  c10::SetAllocator(TYPE, &allocator_);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  at::setHostAllocator(TYPE, &host_allocator_);
  py::class_<Call, CallPtr>(m, "Call")
      .def_readonly("name", &Call::name)
      .def_readonly("sites", &Call::sites)
      .def_readonly("queue", &Call::queue)
      .def("times", [](const Call& call) -> std::optional<std::pair<double, double>> {  // none: nobody has asked yet
        Locked lock(mutex_);
        if (!call.node || !call.node->done) return std::nullopt;
        return std::make_pair(call.node->begin, call.node->end);
      });
  py::class_<When>(m, "When");
  m.def("begin", begin);
  m.def("be_strict", be_strict);
  m.def("install_handler", install_handler);
  m.def("open", open_call);
  m.def("close", [](const CallPtr& call, double seconds, const std::string& engine) {
    Locked lock(mutex_);
    close_call(*call, seconds, engine);
  });
  m.def("use", use);
  m.def("adopt", adopt);
  m.def("cpu_view", cpu_view);
  m.def("view_like", view_like);
  m.def("number", number);
  m.def("sites", sites);
  m.def("is_pinned", [](const at::Tensor& t) { return pinned_.has(t.storage().data()); });
  m.def("take_flight", take_flight);
  m.def("default_generator", [](DeviceIndex d) { return default_generator(d); });
  m.def("swap_random", swap_random);
  m.def("host_waits", [](const CallPtr& call) {
    Locked lock(mutex_);
    auto& q = queues_[call->queue];
    host_waits(q.seen, q.now);
  });
  m.def("host_works", [](double seconds) {
    Locked lock(mutex_);
    host_now().plus += seconds;
  });
  m.def("submit_job", [] {  // the present of the thread that submits it
    Locked lock(mutex_);
    jobs_++;
    return host_now();
  });
  m.def("begin_job", [](const When& submitted) {  // in a thread of Python's, which gets a time of its own
    Locked lock(mutex_);
    if (!thread_) {
      thread_ = hosts_.size();
      hosts_.push_back({});
    }
    host_now() = latest({host_now(), submitted});
  });
  m.def("end_job", [] {
    Locked lock(mutex_);
    jobs_--;
  });
  m.def("host_now", [] {
    Locked lock(mutex_);
    return host_now();
  });
  m.def("host_waits_until", [](const When& moment) {
    Locked lock(mutex_);
    host_now() = latest({host_now(), moment});
  });
  m.def("jobs", [] {
    Locked lock(mutex_);
    return jobs_;
  });
  m.def("stream_waits", [](double until, const std::string& where) {
    Locked lock(mutex_);
    stream_waits(current_queue(device_), {{}, {nullptr, until}}, where);
  });
  m.def("now", [] {  // when the current stream would begin what it is given now
    Locked lock(mutex_);
    return settled(latest({current_queue(device_).now, host_now()}));
  });
  m.def("read_times", [] {  // (this thread's time, each stream's time up to its last call of this thread, waits by place)
    Locked lock(mutex_);
    double host = settled(host_now());
    for (auto& q : queues_) settled(q.given[thread_]);
    std::vector<std::pair<double, std::map<std::string, double>>> streams;
    for (auto& q : queues_) streams.emplace_back(q.given[thread_].value(), std::exchange(q.waited, {}));
    return std::make_pair(host, streams);  // becomes objects of Python without the mutex, see `use`
  });
}
