// A virtual CUDA device for a CPU build of torch. Its tensors say "cuda:0", live in the host's memory and compute with
// the CPU's kernels. Mixed devices raise as on a GPU; what makes the host wait, and every copy to or from the device,
// is reported to a callback. Preloaded, so that torch finds these hooks when it first asks for CUDA.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

constexpr c10::DeviceIndex kNumDevices = 2;
thread_local c10::DeviceIndex current_device = 0;

c10::Device cuda(c10::DeviceIndex index) {
  return {c10::DeviceType::CUDA, index < 0 ? current_device : index};
}

// Events.

using Callback = void (*)(const char* kind, const char* what);
Callback callback = nullptr;

void report(const char* kind, const std::string& what) {
  if (callback != nullptr) callback(kind, what.c_str());
}

// Memory.

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(num_bytes);
    memory.unsafe_set_device(cuda(-1));
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
} device_memory;

// Page-locked ranges of the host's memory: first byte and end.
std::map<const char*, const char*> pinned;
std::mutex pinned_mutex;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  return after != pinned.begin() && static_cast<const char*>(address) < std::prev(after)->second;
}

struct PinnedMemory final : c10::Allocator {
  struct Block {
    c10::DataPtr memory;
  };
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(static_cast<const char*>(block->memory.get()));
    }
    delete block;
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    auto* block = new Block{c10::GetCPUAllocator()->allocate(num_bytes)};
    auto* first = static_cast<char*>(block->memory.get());
    if (num_bytes > 0) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned[first] = first + num_bytes;
    }
    return {first, block, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
} pinned_memory;

// Random numbers: a CPU generator that says "cuda".

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl(cuda(index), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), host.clone()); }
  at::Generator host;
};

// What torch asks CUDA for.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = cuda(-1);
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return cuda(-1); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < kNumDevices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) current_device = to.index();
  }
  c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { report("wait", "synchronize"); }
  void synchronizeEvent(void*) const override { report("wait", "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { report("wait", "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct VirtualHooks final : at::CUDAHooksInterface {
  explicit VirtualHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  int getNumGPUs() const override { return kNumDevices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice(cuda(index)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({c10::DeviceType::CUDA, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(c10::DeviceIndex) const override { report("wait", "synchronize"); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Device getDeviceFromPtr(void*) const override { return cuda(-1); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index);
  }
};

// Any operation: the CPU's kernel on CPU tensors that share the arguments' memory.

using Originals = std::vector<std::pair<at::Tensor, at::Tensor>>;  // a CUDA tensor and its twin on the CPU

at::Tensor tensor_in(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

c10::Storage storage_of(c10::DataPtr memory, size_t num_bytes, c10::Allocator* allocator) {
  return {c10::Storage::use_byte_size_t(), num_bytes, std::move(memory), allocator, /*resizable=*/true};
}

at::Tensor host_twin(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "the virtual device knows no lazy conjugation");
  const auto& storage = tensor.storage();
  c10::DataPtr memory(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
  return tensor_in(storage_of(std::move(memory), storage.nbytes(), c10::GetCPUAllocator()), tensor,
                   c10::DispatchKey::CPU);
}

at::Tensor to_device(const at::Tensor& made, const Originals& originals, c10::Device device) {
  for (const auto& [original, twin] : originals) {
    if (made.unsafeGetTensorImpl() == twin.unsafeGetTensorImpl()) return original;  // changed in place
    if (made.storage().unsafeGetStorageImpl() == twin.storage().unsafeGetStorageImpl())
      return tensor_in(original.storage(), made, c10::DispatchKey::CUDA);  // a view
  }
  auto* owner = new c10::Storage(made.storage());
  auto free = [](void* it) { delete static_cast<c10::Storage*>(it); };
  c10::DataPtr memory(const_cast<void*>(owner->data()), owner, free, device);
  return tensor_in(storage_of(std::move(memory), owner->nbytes(), &device_memory), made, c10::DispatchKey::CUDA);
}

// Operations whose result's size, or whose value, the host needs.
const std::set<std::string> kWaiting{
    "aten::_linalg_eigh",  "aten::_unique2",          "aten::bincount",           "aten::equal",      "aten::histogram",
    "aten::masked_select", "aten::repeat_interleave", "aten::unique_consecutive", "aten::unique_dim", "aten::nonzero",
};

// ``x[index] = values``: what CUDA's kernel waits for and copies. A mask needs its number of rows on the host, unless a
// single number is filled in; a mask, index or value on the CPU is copied. (Reading ``x[index]`` calls ``nonzero`` and
// ``copy_``, which report for themselves.)
void report_index_put(const torch::jit::Stack& stack, size_t first, const std::string& name) {
  const auto values = stack[first + 2].toTensor();
  std::vector<at::Tensor> indices;
  for (const std::optional<at::Tensor>& index : stack[first + 1].toOptionalTensorVector())
    if (index.has_value() && index->defined()) indices.push_back(*index);
  bool is_mask = false, is_on_cpu = values.is_cpu();
  for (const auto& index : indices) {
    is_mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    is_on_cpu |= index.is_cpu();
  }
  if (is_mask && indices.size() == 1 && values.is_cpu() && values.numel() == 1) return;
  if (is_on_cpu) report("blocking upload", name);
  if (is_mask) report("wait", name);
}

template <typename Visit>
c10::IValue replaced_tensors(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& one : value.toTensorVector()) out.push_back(visit(one));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      out.push_back(one.has_value() ? std::optional<at::Tensor>(visit(*one)) : std::nullopt);
    return out;
  }
  return value;
}

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  const bool puts = name == "aten::_index_put_impl_", gets = name == "aten::index";
  if (puts) report_index_put(*stack, first, name);
  std::optional<c10::Device> device, random_device;
  Originals originals;
  std::vector<at::Tensor> on_cpu;
  auto visit = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      on_cpu.push_back(tensor);
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                tensor.device(), "! (in ", name, ")");
    device = tensor.device();
    originals.emplace_back(tensor, host_twin(tensor));
    return originals.back().second;
  };
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = cuda(value.toDevice().index());
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      random_device = generator.device();
      if (random_device->is_cuda()) value = generator.get<DeviceGenerator>()->host;
    } else {
      value = replaced_tensors(value, visit);
    }
  }
  TORCH_CHECK(!random_device || (device && device->type() == random_device->type()), "Expected a '",
              device.value_or(c10::Device(at::kCPU)), "' device type for generator but found '", *random_device, "'");
  TORCH_CHECK(device, name, ": nothing here is on the virtual device");
  for (const auto& tensor : on_cpu) {
    // A number on the CPU may go with tensors on the device, where an operation works on each element.
    const bool takes_numbers = op.hasTag(at::Tag::pointwise) || name.find("fill") != std::string::npos;
    TORCH_CHECK(puts || gets || (tensor.dim() == 0 && takes_numbers),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                " and cpu! (in ", name, ", shape ", tensor.sizes(), ")");
  }
  if (kWaiting.count(name) > 0) report("wait", name);

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (auto& [original, twin] : originals) {
    if (twin.sizes() != original.sizes()) {  // an ``out=`` that the kernel has resized
      at::native::resize_(original, twin.sizes());
      std::memcpy(original.mutable_data_ptr(), twin.const_data_ptr(), twin.nbytes());
    }
  }
  auto wrap = [&](const at::Tensor& made) { return made.defined() ? to_device(made, originals, *device) : made; };
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value)
    *value = replaced_tensors(*value, wrap);
}

// Operations that the fallback does not reach, or that it should not run as any other.

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(cuda(device ? device->index() : -1));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(cuda(device ? device->index() : -1));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool is_upload = !from.is_cuda(), is_download = !to.is_cuda();
  if (is_upload || is_download) {
    // A copy from the device to memory that is not page-locked waits, whatever was asked for; one to the device is
    // staged by the driver.
    const bool locked = is_pinned((is_upload ? from : to).const_data_ptr());
    if (is_upload)
      report(!non_blocking ? "blocking upload" : locked ? "upload" : "staged upload", "copy");
    else
      report(non_blocking && locked ? "download" : "wait", "copy");
  }
  auto host = [](const at::Tensor& tensor) { return tensor.is_cuda() ? host_twin(tensor) : tensor; };
  auto destination = host(to);
  destination.copy_(host(from));
  return to;
}

at::Scalar item(const at::Tensor& tensor) {
  report("wait", "item");
  return host_twin(tensor).item();
}

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                       double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

void record_stream(at::Tensor&, at::Stream) {}

// Known to CUDA alone: there, each group of channels of a convolution has one filter.
at::Tensor depthwise(const at::Tensor& images, const at::Tensor& filters, c10::IntArrayRef,
                     const std::optional<at::Tensor>& bias, c10::IntArrayRef stride, c10::IntArrayRef padding,
                     c10::IntArrayRef dilation) {
  const auto host_bias = bias && bias->defined() ? std::optional(host_twin(*bias)) : std::nullopt;
  const auto made = at::convolution(host_twin(images), host_twin(filters), host_bias, stride, padding, dilation, false,
                                    {0, 0}, images.size(1));
  return to_device(made, {}, images.device());
}

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, VirtualHooks)
}  // namespace at
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &math_attention)
}  // namespace at::native

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  c10::SetAllocator(c10::DeviceType::CUDA, &device_memory);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("_local_scalar_dense", &item);
  library.impl("_fused_sdp_choice", &math_attention);
  library.impl("record_stream", &record_stream);
  library.impl("_conv_depthwise2d", &depthwise);
  library.impl("resize_", &at::native::resize_);
  library.impl("set_", &at::native::set_cpu_);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
}

// Called from Python, through ctypes.
extern "C" {
void virtual_cuda_listen(Callback function) { callback = function; }
int virtual_cuda_num_devices() { return kNumDevices; }
void virtual_cuda_set_device(int index) { Guard().setDevice(cuda(static_cast<c10::DeviceIndex>(index))); }
int virtual_cuda_device() { return current_device; }
void virtual_cuda_pin(const char* first, size_t num_bytes) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned[first] = first + num_bytes;
}
void virtual_cuda_unpin(const char* first) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(first);
}
}
