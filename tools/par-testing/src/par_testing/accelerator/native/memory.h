// Memory of the device: two addresses, a caching allocator, and who used which bytes.
//
// Programs see addresses that nobody can read or write, so a host that follows a pointer of the device is caught. The
// CPU's kernels use the same memory at another address, a fixed distance away, so no page is ever opened for a kernel.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>
#include <set>

#include "order.h"

namespace strict_device {
constexpr size_t ROUND = 512;                // bytes; CUDA's allocator rounds to the same
constexpr size_t UNLIMITED = size_t(1) << 36;

struct Region {
  char *user = nullptr, *real = nullptr;
  size_t size = UNLIMITED, used = 0;
  pid_t owner = 0;
  std::multimap<size_t, char*> freed;

  void reserve(bool pinned) {
    TORCH_CHECK(!user || owner == getpid(),
                "this process was forked after the strict device had been used; fork before its first use");
    if (user) return;
    owner = getpid();
    // Programs may touch pinned memory, so both views need the same pages: a file in memory can be mapped twice.
    int file = pinned ? memfd_create("strict pinned memory", MFD_CLOEXEC) : -1;
    TORCH_CHECK(!pinned || (file >= 0 && !ftruncate(file, size)), "the strict device cannot make ", size, " pinned bytes");
    int open = PROT_READ | PROT_WRITE;
    int flags = MAP_NORESERVE | (pinned ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    user = static_cast<char*>(mmap(nullptr, size, pinned ? open : PROT_NONE, flags, file, 0));
    real = static_cast<char*>(mmap(nullptr, size, open, flags, file, 0));
    if (pinned) close(file);
    TORCH_CHECK(user != MAP_FAILED && real != MAP_FAILED, "the strict device cannot reserve ", size, " bytes");
  }
  char* take(size_t bytes) {
    if (auto found = freed.lower_bound(bytes); found != freed.end()) {
      auto [there, at] = *found;
      freed.erase(found);
      if (there > bytes) freed.emplace(there - bytes, at + bytes);
      return at;
    }
    TORCH_CHECK(used + bytes <= size, "the strict device is out of addresses: ", size, " bytes are reserved");
    used += bytes;
    return user + used - bytes;
  }
  bool has(const void* p) const { return user && p >= user && p < user + size; }
  char* cpu(const void* p) const { return real + (static_cast<const char*>(p) - user); }
};
static Region memory_, pinned_;

// Bytes of a tensor as rows of equal width and distance. Column blocks of one matrix lie between each other's rows, so
// two streams may use them at once, though their first and last bytes enclose each other.
struct Bytes {
  const char *begin, *end;
  size_t width, pitch;  // of a row, and from one row to the next; both are the whole if there is one row
  static Bytes of(const at::Tensor& t) {
    auto* first = static_cast<const char*>(t.storage().data()) + t.storage_offset() * t.itemsize();
    if (!t.numel()) return {first, first, 0, 0};
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, the densest first
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); i++) {
      last += (t.size(i) - 1) * t.stride(i);
      if (t.size(i) > 1 && t.stride(i)) dims.emplace_back(t.stride(i), t.size(i));
    }
    std::sort(dims.begin(), dims.end());
    size_t item = t.itemsize(), whole = (last + 1) * item, next = 0;
    int64_t width = 1;
    while (next < dims.size() && dims[next].first == width) width *= dims[next++].second;
    if (next == dims.size()) return {first, first + whole, whole, whole};
    auto [pitch, rows] = dims[next++];
    while (next < dims.size() && dims[next].first == pitch * rows) rows *= dims[next++].second;
    // More dimensions than rows and columns are taken as all between the first and the last byte.
    if (next < dims.size() || pitch < width) return {first, first + whole, whole, whole};
    return {first, first + whole, size_t(width) * item, size_t(pitch) * item};
  }
  bool whole() const { return pitch == width; }
  bool meets(const Bytes& other) const {
    if (begin >= other.end || other.begin >= end) return false;
    if (whole() && other.whole()) return true;
    if (whole()) return other.meets(*this);
    if (!other.whole() && other.pitch != pitch) return true;  // rows of different matrices: no rule, so no false silence
    auto distance = (other.begin - begin) % std::ptrdiff_t(pitch);
    size_t column = distance < 0 ? distance + pitch : distance;  // where the other begins, in a row of this
    return column < width || column + (other.whole() ? other.end - other.begin : other.width) > pitch;
  }
  bool covers(const Bytes& other) const {
    if (begin > other.begin || other.end > end) return false;
    return whole() || (begin == other.begin && end == other.end && width == other.width && pitch == other.pitch);
  }
};

struct Owner { std::string taken, freed; };  // where in the program
struct Access {
  Bytes bytes;
  bool write;
  CallPtr call;
  std::shared_ptr<Owner> owner;
  std::string what;
};
struct Block {
  char* at;
  size_t size;
  DeviceIndex device;
  size_t pool;  // the stream whose blocks it is among, and whether it is for small tensors
  std::shared_ptr<Owner> owner = {};
  Block *before = nullptr, *after = nullptr;  // in the same segment
  std::set<size_t> users = {};                // other streams, by record_stream
  std::vector<Moment> ends = {};              // when those will be done
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->pool, a->size, a->at) < std::tie(b->pool, b->size, b->at);
  }
};
static std::set<Block*, BySize> free_;
static std::map<const char*, Block*> blocks_;  // by their first byte
static std::map<const char*, std::vector<Access>> segments_;
static std::vector<Block*> pending_;           // freed, but used on other streams
static std::map<DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> stats_;
static size_t limit_ = UNLIMITED;
static bool as_cuda_ = false;

static Block* block_of(const void* p) {
  auto it = blocks_.upper_bound(static_cast<const char*>(p));
  return it == blocks_.begin() ? nullptr : std::prev(it)->second;
}
static void merge(Block* left, Block* right) {
  blocks_.erase(right->at);
  left->size += right->size;
  left->after = right->after;
  if (left->after) left->after->before = left;
  delete right;
}
static void give_back(Block* b) {
  b->users.clear();
  b->ends.clear();
  stats_[b->device].active_bytes[0].decrease(b->size);
  if (b->after && free_.erase(b->after)) merge(b, b->after);
  if (b->before && free_.erase(b->before)) {
    b = b->before;
    merge(b, b->after);
  }
  free_.insert(b);
}
// Gives back what other streams are done with, as far as the host can see, or waits for it.
static void give_back_pending(bool wait) {
  auto blocks = std::move(pending_);
  pending_.clear();
  for (auto* b : blocks) {
    bool over = true;
    for (auto& moment : b->ends) {
      if (wait || is_past(moment)) host_waits(moment.seen, moment.time);
      else over = false;
    }
    if (over) give_back(b);
    else pending_.push_back(b);
  }
}
static void release_segments(DeviceIndex d) {
  for (auto it = free_.begin(); it != free_.end();) {
    auto* b = *it;
    if (b->device != d || b->before || b->after) {
      ++it;
      continue;
    }
    it = free_.erase(it);
    blocks_.erase(b->at);
    segments_.erase(b->at);
    memory_.freed.emplace(b->size, b->at);
    madvise(memory_.cpu(b->at), b->size, MADV_DONTNEED);
    stats_[d].reserved_bytes[0].decrease(b->size);
    delete b;
  }
}
// CUDA's allocator takes 2 MiB at a time for small tensors, 20 MiB for larger ones, and rounds what is larger still.
static size_t segment_for(size_t size) {
  constexpr size_t MIB = size_t(1) << 20;
  if (!as_cuda_) return size;
  return size <= MIB ? 2 * MIB : size < 10 * MIB ? 20 * MIB : (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
}

struct Memory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    auto where = bytes ? sites() : "";
    Locked lock(mutex_);
    memory_.reserve(false);
    auto d = device_;
    if (!bytes) return {nullptr, nullptr, &free, Device(TYPE, d)};
    auto size = (bytes + ROUND - 1) / ROUND * ROUND;
    auto& stats = stats_[d];
    give_back_pending(false);
    size_t pool = 2 * current_queue(d).number + (as_cuda_ && size <= (size_t(1) << 20));
    Block wanted{nullptr, size, d, pool};
    auto it = free_.lower_bound(&wanted);  // the smallest that is large enough
    Block* b = it != free_.end() && (*it)->pool == pool ? *it : nullptr;
    if (b) free_.erase(it);
    else b = new_segment(bytes, segment_for(size), d, pool, where);
    if (b->size > size) {
      auto* rest = new Block{b->at + size, b->size - size, d, pool};
      rest->before = b;
      rest->after = b->after;
      if (b->after) b->after->before = rest;
      b->after = rest;
      b->size = size;
      blocks_[rest->at] = rest;
      free_.insert(rest);
    }
    b->owner = std::make_shared<Owner>(Owner{where, ""});
    stats.allocated_bytes[0].increase(size);
    stats.active_bytes[0].increase(size);
    stats.allocation[0].increase(1);
    std::memset(memory_.cpu(b->at), 0xff, size);  // not a number: what is read before it is written shows
    return {b->at, b->at, &free, Device(TYPE, d)};
  }
  static Block* new_segment(size_t bytes, size_t size, DeviceIndex d, size_t pool, const std::string& where) {
    auto& stats = stats_[d];
    if (stats.reserved_bytes[0].current + int64_t(size) > int64_t(limit_)) {
      stats.num_alloc_retries++;
      host_waits_for_device(d);  // as cudaFree does
      give_back_pending(true);
      release_segments(d);
    }
    if (stats.reserved_bytes[0].current + int64_t(size) > int64_t(limit_)) {
      stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "the strict device ", int(d), " is out of memory: ", bytes,
                       " bytes were asked for at ", where, ", the limit is ", limit_, ", allocated are ",
                       stats.allocated_bytes[0].current, ", reserved are ", stats.reserved_bytes[0].current);
    }
    auto* b = new Block{memory_.take(size), size, d, pool};
    blocks_[b->at] = b;
    segments_[b->at] = {};
    stats.reserved_bytes[0].increase(size);
    return b;
  }
  static void free(void* p) {
    if (!p) return;
    auto where = sites();
    Locked lock(mutex_);
    auto it = blocks_.find(static_cast<char*>(p));
    if (it == blocks_.end()) return;
    auto* b = it->second;
    b->owner->freed = where;
    stats_[b->device].allocated_bytes[0].decrease(b->size);
    stats_[b->device].allocation[0].decrease(1);
    for (auto q : b->users) b->ends.push_back({queues_[q].seen, queues_[q].now});
    if (b->ends.empty()) give_back(b);
    else pending_.push_back(b);
  }
  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t n) const override {
    std::memcpy(memory_.cpu(to), memory_.cpu(from), n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Locked lock(mutex_);
    host_waits_for_device(device_);
    give_back_pending(true);
    release_segments(device_);
  }
  void recordStream(const c10::DataPtr& data, Stream s) override {
    Locked lock(mutex_);
    auto* b = block_of(data.get());
    if (b && queue_of(s).number != b->pool / 2) b->users.insert(queue_of(s).number);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    Locked lock(mutex_);
    return stats_[d];
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    Locked lock(mutex_);
    stats_[d].num_alloc_retries = stats_[d].num_ooms = 0;
  }
  void resetPeakStats(DeviceIndex d) override {
    Locked lock(mutex_);
    auto& s = stats_[d];
    for (auto* each : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.allocation}) (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    return {limit_ - stats_[d].reserved_bytes[0].current, limit_};
  }
};
static Memory allocator_;
inline void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const {
  allocator_.recordStream(data, s);
}

// Notes an access, and returns an earlier one that is not known to be over. History belongs to addresses: memory that
// was freed and taken again is a race as much as a tensor that two streams use.
static std::optional<Access> touch(const CallPtr& call, const Bytes& bytes, bool write, std::string what) {
  auto* b = block_of(bytes.begin);
  auto it = segments_.upper_bound(bytes.begin);
  if (!b || it == segments_.begin()) return std::nullopt;
  auto& past = std::prev(it)->second;
  auto& seen = queues_[call->queue].seen;
  join(seen, host_seen_);  // taking the memory of a result may have made the host wait
  std::optional<Access> found;
  for (size_t i = 0; i < past.size();) {
    auto& a = past[i];
    bool over = knows(seen, a.call->queue, a.call->tick);
    if (!found && !over && (write || a.write) && bytes.meets(a.bytes)) found = a;
    // Whoever is ordered behind this access is ordered behind that one, so that one need not be kept.
    if (over && a.call != call && (write || !a.write) && bytes.covers(a.bytes)) {
      past[i] = std::move(past.back());
      past.pop_back();
    } else {
      i++;
    }
  }
  past.push_back({bytes, write, call, b->owner, std::move(what)});
  if (found) {  // said once: the rest of the run is checked as if it had been ordered
    join(seen, Seen(found->call->queue + 1));
    seen[found->call->queue] = std::max(seen[found->call->queue], found->call->tick);
  }
  return found;
}
}  // namespace strict_device
