// A native device for tests: a PrivateUse1 backend whose memory the host may not touch and whose queue can be behind.
//
// Operations run in torch's own CPU kernels when they are issued. What they would take on the device is a task of the
// current stream, so that what leaves the device with non_blocking arrives in host memory when its stream has got
// there. A copy to the device remembers what it read, and counts a hazard if the host has changed that before the
// stream gets there. Streams race: what a copy to the host takes is garbage, and a hazard is counted, where another
// stream has not yet written the memory when the copy begins, or writes or frees it before the copy ends. The host's
// waits are counted, and those of the main thread can be told to a Python function.
// Random operations fall back to the CPU's kernels and draw from the CPU's generator, as on a device that lacks them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/extension.h>

#include <condition_variable>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_set>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
constexpr auto KIND = DeviceType::PrivateUse1;
constexpr int DEVICES = 4;
enum Counter {
  KERNELS,
  H2D,
  H2D_ASYNC,
  D2H,
  D2H_ASYNC,
  ITEM,
  DEVICE_SYNC,
  STREAM_SYNC,
  EVENT_SYNC,
  DATA_DEPENDENT,
  HAZARD,
  H2D_ELSEWHERE,
  COUNTERS
};
const char* NAMES[] = {"kernels",     "h2d",        "h2d_async",      "d2h",    "d2h_async",    "item", "device_sync",
                       "stream_sync", "event_sync", "data_dependent", "hazard", "h2d_elsewhere"};
std::atomic<long> counts[COUNTERS];
std::atomic<long> lag{0};
std::atomic<long> left{-1};  // operations until the device is lost; negative: it is not
PyObject* told_of_waits = nullptr;
thread_local int inside = 0;  // an operation of torch's that this backend calls is not one of the user's
struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};
std::thread::id main_thread = std::this_thread::get_id();
bool waits(Counter what) { return what != KERNELS && what != H2D_ASYNC && what != D2H_ASYNC && what != HAZARD; }
void count(Counter what) {
  if (inside) return;
  const bool main = std::this_thread::get_id() == main_thread;
  if (what == H2D && !main) what = H2D_ELSEWHERE;  // a thread that prefetches may wait
  ++counts[what];
  if (!waits(what) || what == H2D_ELSEWHERE || (what == EVENT_SYNC && !main) || !told_of_waits) return;
  pybind11::gil_scoped_acquire python;
  Inside quiet;
  PyObject* result = PyObject_CallFunction(told_of_waits, "s", NAMES[what]);
  if (!result) PyErr_Clear();
  Py_XDECREF(result);
}
bool lost_by_environment() {  // read with the first operation: a rank's own environment
  const char *operations = std::getenv("SIMULATED_DEVICE_LOST_AFTER"),
             *rank = std::getenv("SIMULATED_DEVICE_LOST_RANK");
  const char* own = std::getenv("RANK");
  if (operations && (!rank || (own && std::string(rank) == own))) left = std::atol(operations);
  return true;
}
int device_count() {  // of this machine, now
  const char* file = std::getenv("SIMULATED_DEVICE_COUNT_FILE");
  int count = DEVICES;
  if (file) std::ifstream(file) >> count;
  return count;
}
bool lose_device() {
  if (const char* file = std::getenv("SIMULATED_DEVICE_COUNT_FILE")) {
    const int count = device_count() - 1;
    std::ofstream(file) << count;
  }
  return true;
}
void operate() {  // one more operation of the user's
  static const bool read = lost_by_environment();
  if (inside || left < 0) return;
  if (left > 0 && --left > 0) return;
  static const bool gone = lose_device();
  if (std::getenv("SIMULATED_DEVICE_DIES")) std::abort();
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1, "simulated device: lost");
}

// --- memory: each block has its own pages, closed unless an operation has opened it
struct Access {  // a stream's read or write of a block
  long queue;
  std::atomic<bool> ended{false}, torn{false};
  explicit Access(long queue) : queue(queue) {}
};
using Accesses = std::vector<std::shared_ptr<Access>>;
struct Block {
  size_t size;
  int open;
  DeviceIndex device;
  Accesses reads, writes;  // those that may not have ended
};
std::mutex memory_lock;
std::map<char*, Block>& blocks() {
  static auto* all = new std::map<char*, Block>;
  return *all;
}
std::map<char*, Block>::iterator block_of(const void* address) {  // the lock is held
  auto at = (char*)address;
  auto next = blocks().upper_bound(at);
  if (next == blocks().begin()) return blocks().end();
  --next;
  return at < next->first + next->second.size ? next : blocks().end();
}
struct Open {  // makes the memory of tensors accessible
  std::vector<char*> opened;
  void add(const at::Tensor& tensor, bool writes = false) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.device().type() != KIND) return;
    if (writes) tensor.storage().mutable_data();  // memory of its own, where it is shared until somebody writes
    std::lock_guard<std::mutex> hold(memory_lock);
    add(tensor.storage().data());
  }
  void add(const void* address) {  // the lock is held
    auto found = block_of(address);
    if (found == blocks().end()) return;
    if (found->second.open++ == 0) mprotect(found->first, found->second.size, PROT_READ | PROT_WRITE);
    opened.push_back(found->first);
  }
  ~Open() {
    std::lock_guard<std::mutex> hold(memory_lock);
    for (auto address : opened) {
      auto found = blocks().find(address);
      if (found != blocks().end() && --found->second.open == 0) mprotect(address, found->second.size, PROT_NONE);
    }
  }
};
thread_local DeviceIndex current_device = 0;
void writes(const void* address);
void copies(void* target, const void* source, size_t size);
std::unordered_set<std::string> refused;  // operations that the device does not have; `copy_data`, of its allocator
void release(void* address) {
  writes(address);  // others may get the memory, in the order of the stream
  std::lock_guard<std::mutex> hold(memory_lock);
  auto found = blocks().find((char*)address);
  if (found == blocks().end()) return;
  munmap(address, found->second.size);
  blocks().erase(found);
}
struct DeviceMemory final : c10::Allocator {
  at::DataPtr allocate(size_t size) override {
    Device device(KIND, current_device);
    if (size == 0) return {nullptr, nullptr, &release, device};
    size_t whole = (size + 4095) / 4096 * 4096;
    void* address = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "out of device memory");
    std::lock_guard<std::mutex> hold(memory_lock);
    blocks()[(char*)address] = {whole, 0, current_device, {}, {}};
    return {address, address, &release, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override {
    TORCH_CHECK(!refused.count("copy_data"), "this device's allocator cannot copy");
    copies(target, source, size);
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(KIND, &device_memory);

// --- pinned host memory
std::mutex pinned_lock;
std::map<char*, size_t>& pinned() {
  static auto* all = new std::map<char*, size_t>;
  return *all;
}
void unpin(void* address) {
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned().erase((char*)address);
  }
  std::free(address);
}
struct PinnedMemory final : c10::Allocator {
  at::DataPtr allocate(size_t size) override {
    void* address = std::aligned_alloc(64, (size + 64) / 64 * 64);
    {
      std::lock_guard<std::mutex> hold(pinned_lock);
      pinned()[(char*)address] = std::max<size_t>(size, 1);
    }
    return {address, address, &unpin, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
};
PinnedMemory pinned_memory;

// --- streams and events
struct Queue {
  std::mutex lock;
  std::condition_variable more, done;
  std::deque<std::function<void()>> tasks;
  long issued = 0, ended = 0;
  Queue() {
    std::thread([this] {
      for (;;) {
        std::function<void()> task;
        {
          std::unique_lock<std::mutex> hold(lock);
          more.wait(hold, [&] { return !tasks.empty(); });
          task = std::move(tasks.front());
          tasks.pop_front();
        }
        task();
        task = nullptr;
        {
          std::lock_guard<std::mutex> hold(lock);
          ++ended;
        }
        done.notify_all();
      }
    }).detach();
  }
  void push(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> hold(lock);
      tasks.push_back(std::move(task));
      ++issued;
    }
    more.notify_one();
  }
  bool idle() {
    std::lock_guard<std::mutex> hold(lock);
    return issued == ended;
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock);
    long until = issued;
    done.wait(hold, [&] { return ended >= until; });
  }
};
std::mutex queues_lock;
std::map<std::pair<int, long>, Queue*>& queues() {
  static auto* all = new std::map<std::pair<int, long>, Queue*>;
  return *all;
}
Queue& queue_of(DeviceIndex device, long id) {
  std::lock_guard<std::mutex> hold(queues_lock);
  auto& queue = queues()[{device, id}];
  if (!queue) queue = new Queue;
  return *queue;
}
thread_local long current_stream[DEVICES];
Queue& current_queue() { return queue_of(current_device, current_stream[current_device]); }
struct Event {
  std::mutex lock;
  std::condition_variable done;
  bool happened = true;
};
std::shared_ptr<Event> held;  // of a stream that a test holds back
struct EventHandle {
  std::shared_ptr<Event> event;
};

void spend() {
  long us = lag;
  if (us > 0) current_queue().push([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}
void tracks(Accesses& all, const std::shared_ptr<Access>& one) {
  std::erase_if(all, [](auto& each) { return each->ended.load(); });
  all.push_back(one);
}
Accesses elsewhere(const Accesses& all, long queue) {
  Accesses found;
  for (auto& each : all)
    if (each->queue != queue && !each->ended) found.push_back(each);
  return found;
}
std::shared_ptr<Access> reads(const void* address, Accesses& before) {  // the stream's task is to check `before`
  auto one = std::make_shared<Access>(current_stream[current_device]);
  std::lock_guard<std::mutex> hold(memory_lock);
  auto found = block_of(address);
  if (found == blocks().end()) return one;
  before = elsewhere(found->second.writes, one->queue);
  tracks(found->second.reads, one);
  return one;
}
void writes(const void* address) {
  if (lag == 0) return;
  auto one = std::make_shared<Access>(current_stream[current_device]);
  Accesses during;
  {
    std::lock_guard<std::mutex> hold(memory_lock);
    auto found = block_of(address);
    if (found == blocks().end()) return;
    during = elsewhere(found->second.reads, one->queue);
    tracks(found->second.writes, one);
  }
  current_queue().push([one, during] {
    for (auto& each : during)
      if (!each->ended) each->torn = true;
    one->ended = true;
  });
}
void copies(void* target, const void* source, size_t size) {
  Open open;
  {
    std::lock_guard<std::mutex> hold(memory_lock);
    open.add(target);
    open.add(source);
  }
  spend();
  std::memcpy(target, source, size);
  writes(target);
}
void catch_up() {
  if (lag > 0) {
    pybind11::gil_scoped_release* free = PyGILState_Check() ? new pybind11::gil_scoped_release : nullptr;
    current_queue().wait();
    delete free;
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device d) const override {
    Device old(KIND, current_device);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(KIND, current_device); }
  void setDevice(Device d) const override {
    if (d.index() >= 0) {
      TORCH_CHECK(d.index() < DEVICES, "no such device");
      current_device = d.index();
    }
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  static DeviceIndex index(Device d) { return d.index() < 0 ? current_device : d.index(); }
  Stream getStream(Device d) const override {
    return Stream(Stream::UNSAFE, Device(KIND, index(d)), current_stream[index(d)]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(KIND, index(d)), 0); }
  Stream getNewStream(Device d, int) const override {
    static std::atomic<long> next{0};
    return Stream(Stream::UNSAFE, Device(KIND, index(d)), ++next);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    Stream old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    auto handle = *event ? (EventHandle*)*event : new EventHandle;
    *event = handle;
    auto shared = handle->event = std::make_shared<Event>();
    shared->happened = false;
    queue_of(s.device_index(), s.id()).push([shared] {
      {
        std::lock_guard<std::mutex> hold(shared->lock);
        shared->happened = true;
      }
      shared->done.notify_all();
    });
  }
  static void wait_for(std::shared_ptr<Event> event) {
    if (event) {
      std::unique_lock<std::mutex> hold(event->lock);
      event->done.wait(hold, [&] { return event->happened; });
    }
  }
  void block(void* event, const Stream& s) const override {
    if (event) {
      auto shared = ((EventHandle*)event)->event;
      queue_of(s.device_index(), s.id()).push([shared] { wait_for(shared); });
    }
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto e = ((EventHandle*)event)->event;
    std::lock_guard<std::mutex> hold(e->lock);
    return e->happened;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (EventHandle*)event; }
  void synchronizeEvent(void* event) const override {
    count(EVENT_SYNC);
    if (event) wait_for(((EventHandle*)event)->event);
  }
  bool queryStream(const Stream& s) const override { return queue_of(s.device_index(), s.id()).idle(); }
  void synchronizeStream(const Stream& s) const override {
    count(STREAM_SYNC);
    queue_of(s.device_index(), s.id()).wait();
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    count(DEVICE_SYNC);
    std::vector<Queue*> all;
    {
      std::lock_guard<std::mutex> hold(queues_lock);
      for (auto& [key, queue] : queues())
        if (key.first == d) all.push_back(queue);
    }
    for (auto queue : all) queue->wait();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex d) {
    device_ = Device(KIND, d);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto old = current_device;
    current_device = d;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    auto old = current_device;
    if (d >= 0) current_device = d;
    return old;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    static auto* all = [] {
      auto* made = new std::vector<at::Generator>;
      for (int i = 0; i < DEVICES; ++i) made->push_back(at::make_generator<Generator>(i));
      return made;
    }();
    return (*all)[d < 0 ? current_device : d];
  }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current_device : d);
  }
  Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::mutex> hold(memory_lock);
    auto found = block_of(address);
    TORCH_CHECK(found != blocks().end(), "not device memory");
    return Device(KIND, found->second.device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> hold(pinned_lock);
    auto next = pinned().upper_bound((char*)address);
    return next != pinned().begin() && (--next, (char*)address < next->first + next->second);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = device_memory.allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept) {
      mprotect(fresh.get(), (size + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE);
      mprotect(storage.mutable_data(), (storage.nbytes() + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE);
      std::memcpy(fresh.get(), storage.data(), kept);
      mprotect(fresh.get(), (size + 4095) / 4096 * 4096, PROT_NONE);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// --- operations
at::Tensor on_host(const at::Tensor& t) {
  auto address = t.numel() ? const_cast<void*>(t.const_data_ptr()) : nullptr;
  at::Tensor found = at::from_blob(address, t.sizes(), t.strides(), t.options().device(at::kCPU));
  if (t.is_conj()) found = found.conj();
  return t.is_neg() ? found._neg_view() : found;
}
c10::Device where(std::optional<Device> d) { return d && d->index() >= 0 ? *d : Device(KIND, current_device); }
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
  c10::DeviceGuard guard(where(device));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
  c10::DeviceGuard guard(where(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
void move(const at::Tensor& source, const at::Tensor& target) {  // with both open
  at::NoGradGuard no_grad;
  Inside in;
  at::Tensor from = source.device().is_cpu() ? source : on_host(source),
             to = target.device().is_cpu() ? target : on_host(target);
  to.copy_(from);
}
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Open open;
  open.add(source);
  open.add(target, true);
  const bool leaves = target.device().is_cpu(), enters = source.device().is_cpu();
  if (!inside) {
    operate();
    count(leaves ? (non_blocking ? D2H_ASYNC : D2H) : enters ? (non_blocking ? H2D_ASYNC : H2D) : KERNELS);
    spend();
  }
  if (!leaves) writes(target.storage().data());
  if (inside) {
    move(source, target);
    return target;
  }
  if (lag == 0 || !(leaves || enters) || !source.numel()) {
    move(source, target);
    return target;
  }
  if (!non_blocking) {
    catch_up();
    move(source, target);
    return target;
  }
  Inside in;
  at::Tensor host = on_host(leaves ? target : source), seen = on_host(source).clone();
  c10::Storage keep = (leaves ? target : source).storage();
  if (enters) move(source, target);
  Accesses before;
  std::shared_ptr<Access> read = leaves ? reads(source.storage().data(), before) : nullptr;
  current_queue().push([host, seen, keep, leaves, read, before]() mutable {
    at::NoGradGuard no_grad;
    Inside in;
    if (leaves) {
      bool torn = read->torn;
      for (auto& each : before) torn |= !each->ended;
      read->ended = true;
      if (torn) ++counts[HAZARD];
      torn ? host.fill_(77) : host.copy_(seen);
    } else if (!at::equal(host.contiguous().view(-1), seen.contiguous().view(-1)))
      ++counts[HAZARD];
  });
  return target;
}
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}
at::Scalar item(const at::Tensor& t) {
  operate();
  count(ITEM);
  if (!inside) catch_up();
  Open open;
  open.add(t);
  Inside in;
  return on_host(t).item();
}
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_complex(const at::Tensor& t) { return at::native::view_as_complex(t); }
at::Tensor as_real(const at::Tensor& t) { return at::native::view_as_real(t); }
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) { return at::native::set_tensor_(t, source); }
at::Tensor& set_storage(at::Tensor& t, at::Storage source) { return at::native::set_(t, source); }
at::Tensor& set_all(at::Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  return at::cpu::set_(t, storage, offset, size, stride);
}
int64_t attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                  bool, std::optional<double>, bool) {
  return 0;
}  // composed of other operations
at::Tensor histogram(const at::Tensor& values, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  operate();  // the CPU has none of integers
  count(KERNELS);
  spend();
  Inside in;
  return at::histc(values.cpu().to(at::kDouble), bins, low, high).to(values.scalar_type()).to(values.device());
}
using Sizes = c10::SymIntArrayRef;
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       Sizes stride, Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                       c10::SymInt groups) {
  operate();
  count(KERNELS);
  spend();
  Inside in;
  const auto added = bias && bias->defined() ? std::optional<at::Tensor>(bias->cpu()) : std::nullopt;
  return at::convolution_symint(input.cpu(), weight.cpu(), added, stride, padding, dilation, transposed, output_padding,
                                groups)
      .to(input.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& input,
                                                                    const at::Tensor& weight, Sizes stride,
                                                                    Sizes padding, Sizes dilation, bool transposed,
                                                                    Sizes output_padding, c10::SymInt groups,
                                                                    std::array<bool, 3> mask) {
  operate();
  count(KERNELS);
  spend();
  Inside in;
  const std::vector<c10::SymInt> bias = {transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [first, second, third] =
      at::convolution_backward_symint(gradient.cpu(), input.cpu(), weight.cpu(), Sizes(bias), stride, padding, dilation,
                                      transposed, output_padding, groups, mask);
  auto back = [&](const at::Tensor& each) { return each.defined() ? each.to(input.device()) : each; };
  return {back(first), back(second), back(third)};
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::unordered_set<std::string> reads = {"aten::equal",    "aten::nonzero",    "aten::masked_select",
                                                        "aten::_unique2", "aten::unique_dim", "aten::is_nonzero",
                                                        "aten::bincount"};
  if (!inside) {
    TORCH_CHECK_NOT_IMPLEMENTED(!refused.count(op.schema().name()), op.schema().name(), " is not there");
    operate();
    count(KERNELS);
    spend();
    if (reads.count(op.schema().name())) {
      count(DATA_DEPENDENT);
      catch_up();
    }
  }
  Inside in;
  at::native::cpu_fallback(op, stack);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("view_as_complex", as_complex);
  m.impl("view_as_real", as_real);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_all);
  m.impl("_fused_sdp_choice", attention);
  m.impl("histc", histogram);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
// A copy resolves these itself: their fallbacks would copy, and so call it again and again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
#define IN_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER) AT_FORALL_FP32(IN_FLOAT32)
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  if (auto us = std::getenv("SIMULATED_DEVICE_LAG_US")) lag = std::atol(us);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("set_lag", [](long us) { lag = us; });
  m.def("hold_back", [](long stream) {
    auto event = held = std::make_shared<Event>();
    event->happened = false;
    queue_of(current_device, stream).push([event] { Guard::wait_for(event); });
  });
  m.def("let_go", [] {
    std::lock_guard<std::mutex> hold(held->lock);
    held->happened = true;
    held->done.notify_all();
  });
  m.def("refuse", [](const std::string& name) { refused.insert(name); });
  m.def("lose_after", [](long operations) { left = operations; });
  m.def("tell_of_waits", [](pybind11::object function) {
    told_of_waits = nullptr;
    if (!function.is_none()) told_of_waits = function.release().ptr();  // kept for good: a test has few of them
  });
  m.def("reset", [] {
    for (auto& each : counts) each = 0;
  });
  m.def("counts", [] {
    std::map<std::string, long> all;
    for (int i = 0; i < COUNTERS; ++i) all[NAMES[i]] = counts[i];
    return all;
  });
  m.def("device_count", device_count);
  m.def("current_device", [] { return (int)current_device; });
  m.def("set_device", [](int d) { current_device = d; });
  m.def("generator", [](int d) { return at::globalContext().defaultGenerator(Device(KIND, d)); });
}
