// Pinned memory of the host: a copy without a wait uses it later, so until then the host may not touch it.
//
// While a copy is under way the program's view of the buffer's pages is closed: to all if the copy writes it, to writes
// if the copy reads it. Whoever touches it all the same gets a signal; the handler opens the page, so that the program
// goes on, and has the interpreter raise an error behind that very line.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>

#include "memory.h"

namespace strict_device {
constexpr size_t PAGE = 4096;
struct Flight {
  const char *begin, *end;
  bool writes;
  CallPtr call;
};
static std::deque<Flight> flights_;

static void protect(const Flight& f, int rights) {
  auto first = uintptr_t(f.begin) / PAGE * PAGE, last = (uintptr_t(f.end) + PAGE - 1) / PAGE * PAGE;
  mprotect(reinterpret_cast<void*>(first), last - first, rights);
}
static void open_landed() {
  std::deque<Flight> left;
  bool any = false;
  for (auto& f : flights_) {
    if (!knows(host_seen_, f.call->queue, f.call->tick)) {
      left.push_back(f);
      continue;
    }
    protect(f, PROT_READ | PROT_WRITE);
    any = true;
  }
  if (!any) return;
  flights_.swap(left);
  // Those that are left may share pages with what was opened; the stricter right comes last.
  for (auto& f : flights_) if (!f.writes) protect(f, PROT_READ);
  for (auto& f : flights_) if (f.writes) protect(f, PROT_NONE);
}

// Faults -----------------------------------------------------------------------------------------------------------
static struct {
  std::atomic<bool> any{false};
  const void* address;
  bool writing;
  CallPtr call;  // none: memory of the device
} fault_;
static py::object* on_fault_ = nullptr;
static struct sigaction handler_before_;

static int raise_fault(void*) {
  py::gil_scoped_acquire gil;
  try {
    if (fault_.any.exchange(false)) (*on_fault_)(fault_.writing, std::exchange(fault_.call, nullptr), uintptr_t(fault_.address));
  } catch (py::error_already_set& error) {
    error.restore();
    return -1;
  }
  return 0;
}
static void on_signal(int number, siginfo_t* info, void* context) {
  auto* at = static_cast<char*>(info->si_addr);
  bool of_device = memory_.has(at);
  if (!of_device && !pinned_.has(at)) {  // somebody else's fault: the handler before this one has it
    if ((handler_before_.sa_flags & SA_SIGINFO) && handler_before_.sa_sigaction) {
      handler_before_.sa_sigaction(number, info, context);
    } else {
      sigaction(SIGSEGV, &handler_before_, nullptr);
    }
    return;
  }
  bool broken = of_device;
  CallPtr call;
  if (!of_device)
    for (auto& f : flights_)
      if (at >= f.begin && at < f.end) call = f.call, broken = true;
  // A neighbour in the same page may be touched, so that fault is only let through.
  mprotect(reinterpret_cast<void*>(uintptr_t(at) / PAGE * PAGE), PAGE, PROT_READ | PROT_WRITE);
  if (!broken || fault_.any) return;
#ifdef __x86_64__
  fault_.writing = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
  fault_.address = at;
  fault_.call = call;
  fault_.any = true;
  Py_AddPendingCall(raise_fault, nullptr);
}
static void install_handler() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_signal) return;
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &handler_before_);
}

// The allocator ----------------------------------------------------------------------------------------------------
struct HostBlock {
  size_t size;
  std::vector<Moment> uses;  // copies; the block is used again when they are over
};
static std::map<const char*, HostBlock> host_blocks_;
static std::vector<std::pair<char*, HostBlock>> host_pending_;
static at::HostStats host_stats_;

struct Pinned final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    auto where = sites();
    Locked lock(mutex_);
    pinned_.reserve(true);
    std::vector<std::pair<char*, HostBlock>> left;
    for (auto& [at, block] : host_pending_) {
      bool over = true;
      for (auto& moment : block.uses) {
        if (is_past(moment)) host_waits(moment.seen, moment.time);
        else over = false;
      }
      if (over) pinned_.freed.emplace(block.size, at);
      else left.emplace_back(at, block);
    }
    host_pending_.swap(left);
    size_t size = PAGE;
    while (size < bytes) size *= 2;  // as torch rounds for CUDA
    auto* at = pinned_.take(size);
    auto*& block = blocks_[at];
    if (!block) block = new Block{at, size, -1, 0};
    block->owner = std::make_shared<Owner>(Owner{where, ""});
    segments_[at];
    host_blocks_[at] = {size, {}};
    host_stats_.active_bytes.increase(size);
    return {at, at, &free, Device(c10::DeviceType::CPU)};
  }
  static void free(void* p) {
    Locked lock(mutex_);
    auto it = host_blocks_.find(static_cast<char*>(p));
    if (it == host_blocks_.end()) return;
    host_stats_.active_bytes.decrease(it->second.size);
    host_pending_.emplace_back(static_cast<char*>(p), it->second);
    host_blocks_.erase(it);
  }
  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void* p, void*, Stream s) override {
    Locked lock(mutex_);
    auto it = host_blocks_.upper_bound(static_cast<char*>(p));
    if (it == host_blocks_.begin()) return false;
    auto& q = queue_of(s);
    std::prev(it)->second.uses.push_back({q.seen, q.now});
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return host_stats_; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { host_stats_.active_bytes.reset_peak(); }
};
static Pinned host_allocator_;

static void take_flight(const CallPtr& call, const at::Tensor& t, bool writes) {
  Locked lock(mutex_);
  auto& q = queues_[call->queue];
  auto bytes = Bytes::of(t);
  if (bytes.begin == bytes.end) return;
  auto it = host_blocks_.upper_bound(bytes.begin);
  if (it != host_blocks_.begin()) std::prev(it)->second.uses.push_back({q.seen, q.now});
  flights_.push_back({bytes.begin, bytes.end, writes, call});
  protect(flights_.back(), writes ? PROT_NONE : PROT_READ);
}
}  // namespace strict_device
