// What happens before what: streams, events, the host.
//
// Every kernel runs at once, when it is launched. A GPU would run it later, and in parallel with what other streams do.
// So each stream carries a vector clock: for every stream, how many of its calls are known to be over before the next
// call of this one begins. Two calls are ordered if and only if a clock says so, whatever the timing of this run.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "time.h"

#if PY_VERSION_HEX >= 0x030d0000
#define STRICT_IS_FINALIZING Py_IsFinalizing
#else
#define STRICT_IS_FINALIZING _Py_IsFinalizing
#endif

namespace strict_device {
using c10::Device, c10::DeviceIndex, c10::Stream;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;

// Taken last: whoever needs the interpreter's lock takes that one first, else two threads would wait for each other.
static std::recursive_mutex mutex_;
using Locked = std::lock_guard<std::recursive_mutex>;

// Vector clocks ----------------------------------------------------------------------------------------------------
using Seen = std::vector<uint64_t>;  // for each stream, how many of its calls are over
struct Moment {                      // what an event holds
  Seen seen;
  When time = {};
};

static void join(Seen& seen, const Seen& other) {
  if (seen.size() < other.size()) seen.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) seen[i] = std::max(seen[i], other[i]);
}
static bool knows(const Seen& seen, size_t queue, uint64_t tick) { return queue < seen.size() && seen[queue] >= tick; }

struct Queue {  // a stream
  size_t number;
  DeviceIndex device;
  Seen seen;
  When now = {};   // when all that it was given is done
  std::map<size_t, When> given = {};           // and what it was given by each thread
  std::map<std::string, double> waited = {};   // how long it waited for events, by the place that made it wait
};
struct Call {  // one kernel or copy
  std::string name, sites;
  size_t queue;
  uint64_t tick;
  NodePtr node = {};
};
using CallPtr = std::shared_ptr<Call>;

constexpr size_t MANY = 10'000;  // calls without times

static DeviceIndex devices_ = 1;
static std::deque<Queue> queues_;  // the first ones are the devices' default streams
static thread_local DeviceIndex device_ = 0;
static thread_local std::map<DeviceIndex, c10::StreamId> current_;

// The host. What it knows, every later launch knows. Autograd's threads work for the main one, which waits for them,
// so they share its time; a thread of Python's that issues beside it has a time of its own.
struct Host {
  When now = {};
  uint64_t issued = 0;
};
static Seen host_seen_;
static double launch_ = 0;
static std::deque<Host> hosts_(1);
static thread_local size_t thread_ = 0;
static When& host_now() { return hosts_[thread_].now; }
static size_t jobs_ = 0;  // of threads with a time of their own: submitted, and not yet ended

static void make_default_streams() {
  for (DeviceIndex d = queues_.size(); d < devices_; d++) queues_.push_back({size_t(d), d});
}
static Queue& queue_of(Stream s) { return queues_.at(s.id() == 0 ? s.device_index() : s.id()); }
static Queue& current_queue(DeviceIndex d) {
  auto id = current_[d];
  return queues_.at(id == 0 ? d : id);
}

static void open_landed();  // pinned.h: what the host knows to be over, it may touch again
static void host_waits(const Seen& seen, const When& time) {
  host_now() = latest({host_now(), time});
  join(host_seen_, seen);
  open_landed();
}
static bool is_past(const Moment& moment) {  // as the host can see by the time
  for (size_t i = 0; i < moment.seen.size(); i++)
    if (!knows(host_seen_, i, moment.seen[i])) return settled(moment.time) <= settled(host_now());
  return true;  // it knows that without looking at the clock
}
static void host_waits_for_device(DeviceIndex d) {
  for (auto& q : queues_)
    if (q.device == d) host_waits(q.seen, q.now);
}
// Asking takes time, too: a program that polls an event in a loop must come to an end in virtual time.
static bool is_over(const Seen& seen, const When& time) {
  host_now().plus += 1e-6;
  if (settled(time) > settled(host_now())) return false;
  host_waits(seen, time);
  return true;
}
static void stream_waits(Queue& q, const Moment& moment, const std::string& where) {
  join(q.seen, moment.seen);
  auto since = latest({q.now, host_now()});
  auto node = std::make_shared<Node>();
  node->waited = std::make_shared<Waited>(Waited{q.waited, where, since.node});
  q.given[thread_] = q.now = {add_node(node, {since, moment.time})};
}

// Where in the program ---------------------------------------------------------------------------------------------
static std::vector<std::string> not_programs_;  // folders: torch's, Python's, this package's
static bool is_program(const std::string& file) {
  if (file.rfind("<", 0) == 0) return false;
  for (auto& folder : not_programs_)
    if (file.rfind(folder, 0) == 0 && file.find("/site-packages/", folder.size() - 1) == std::string::npos) return false;
  return true;
}
static std::string sites() {  // the three innermost calls of the program
  std::string found;
  if (!Py_IsInitialized() || STRICT_IS_FINALIZING()) return found;
  py::gil_scoped_acquire gil;
  auto* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int n = 0; frame && n < 3;) {
    auto* code = PyFrame_GetCode(frame);
    const char* text = PyUnicode_AsUTF8(code->co_filename);
    std::string file = text ? text : "<";
    if (is_program(file)) {
      found += n++ ? " < " : "";
      found += file.substr(file.rfind('/') + 1) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    auto* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return found;
}

static CallPtr open_call(const std::string& name) {
  auto where = sites();
  Locked lock(mutex_);
  auto& q = current_queue(device_);
  join(q.seen, host_seen_);
  if (q.seen.size() <= q.number) q.seen.resize(q.number + 1);
  return std::make_shared<Call>(Call{name, where, q.number, ++q.seen[q.number]});
}
static void close_call(Call& call, double seconds, const std::string& engine) {
  auto& q = queues_[call.queue];
  auto node = std::make_shared<Node>();
  node->engine = &engines_[{q.device, engine}];
  node->seconds = seconds;
  node->turn = {thread_, hosts_[thread_].issued++};
  call.node = add_node(node, {q.now, host_now()});
  q.given[thread_] = q.now = {node};
  host_now().plus += launch_;
  // A program that never asks for a time does not keep all of its calls. Only one thread issues, so all turns are known.
  if (undone_.size() > MANY && !jobs_) settled(q.now);
}

// What torch asks of streams and events ----------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  DeviceIndex deviceCount() const noexcept override { return devices_; }
  Device getDevice() const override { return Device(TYPE, device_); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < devices_, "there is no device ", d, ": there are ", int(devices_));
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) device_ = d.index();
  }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  static DeviceIndex index_of(Device d) { return d.index() < 0 ? device_ : d.index(); }
  Stream getStream(Device d) const override {
    return Stream(Stream::UNSAFE, Device(TYPE, index_of(d)), current_[index_of(d)]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, Device(TYPE, index_of(d))); }
  Stream getNewStream(Device d, int) const override {
    Locked lock(mutex_);
    queues_.push_back({queues_.size(), index_of(d)});
    return Stream(Stream::UNSAFE, Device(TYPE, index_of(d)), queues_.back().number);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto before = getStream(s.device());
    current_[s.device_index()] = s.id();
    return before;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    Locked lock(mutex_);
    auto& q = queue_of(s);
    join(q.seen, host_seen_);
    if (!*event) *event = new Moment();
    *static_cast<Moment*>(*event) = {q.seen, latest({q.now, host_now()})};
  }
  void block(void* event, const Stream& s) const override {
    if (!event) return;  // an event that was never recorded holds nobody back, as on a GPU
    auto where = sites();
    Locked lock(mutex_);
    stream_waits(queue_of(s), *static_cast<Moment*>(event), where);
  }
  bool queryEvent(void* event) const override {
    Locked lock(mutex_);
    auto* moment = static_cast<Moment*>(event);
    return !moment || is_over(moment->seen, moment->time);
  }
  bool queryStream(const Stream& s) const override {
    Locked lock(mutex_);
    auto& q = queue_of(s);
    return is_over(q.seen, q.now);
  }
  void synchronizeStream(const Stream& s) const override {
    Locked lock(mutex_);
    auto& q = queue_of(s);
    host_waits(q.seen, q.now);
  }
  void synchronizeEvent(void* event) const override {
    Locked lock(mutex_);
    if (auto* moment = static_cast<Moment*>(event)) host_waits(moment->seen, moment->time);
  }
  void synchronizeDevice(DeviceIndex d) const override {
    Locked lock(mutex_);
    host_waits_for_device(d < 0 ? device_ : d);
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    TORCH_CHECK(from && to, "both events must have been recorded");
    Locked lock(mutex_);
    return 1e3 * (settled(static_cast<Moment*>(to)->time) - settled(static_cast<Moment*>(from)->time));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override;
};
}  // namespace strict_device
