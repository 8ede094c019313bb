//! The runtime that runs nothing.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use cubecl::backtrace::BackTrace;
use cubecl::bytes::Bytes;
use cubecl::device::{Device, DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::future::DynFut;
use cubecl::ir::features::Plane;
use cubecl::ir::{DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties, TargetProperties};
use cubecl::prelude::*;
use cubecl::profile::{ProfileDuration, TimingMethod};
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, ExecutionMode, IoError, KernelArguments, ProfileError, ProfilingToken,
    ServerCommunication, ServerError, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl::zspace::{Shape, Strides};
use cubecl::{Compiler, CubeTask};
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::{CudaDialect, mma::CudaWmmaCompiler};
use cubecl_cpp::metal::{MslDialect, arch::MetalArchitecture};
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features, register_wmma_features,
};
use cubecl_cpp::{DialectWmmaCompiler, MslCompiler, register_supported_types};
use cubecl_runtime::allocator::ContiguousMemoryLayoutPolicy;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{ManagedMemoryHandle, MemoryAllocationMode, MemoryUsage};
use cubecl_runtime::storage::{BytesResource, BytesStorage, ManagedResource};

use crate::DeviceKind;
use crate::gpu::{Client, Gpu, Opened};

/// What was lowered: the target, the kernel, and its source or the reason that there is none.
pub(crate) type Text = (&'static str, &'static str, Result<String, String>);

static TEXTS: Mutex<Vec<Text>> = Mutex::new(Vec::new());

/// Everything that was lowered for `target` so far.
pub(crate) fn texts(target: &str) -> Vec<Text> {
    TEXTS.lock().unwrap().iter().filter(|t| t.0 == target).cloned().collect()
}

/// A device of a target, to be used through the library.
pub(crate) fn gpu<T: Target>() -> Gpu {
    let client = <Lower<T> as Runtime>::client(&Default::default());
    let (name, client) = (T::NAME.into(), T::wrap(client));
    Gpu(Arc::new(Opened { kind: T::KIND, index: 900, name, hardware: true, client, stale: Default::default() }))
}

/// What is lowered to.
pub(crate) trait Target: Send + Sync + Clone + Default + core::fmt::Debug + 'static {
    const NAME: &'static str;
    const KIND: DeviceKind;
    type C: Compiler + Default;
    fn options() -> <Self::C as Compiler>::CompilationOptions;
    fn properties() -> DeviceProperties;
    fn target() -> TargetProperties {
        TargetProperties { mma: Default::default() }
    }
    fn wrap(client: ComputeClient<Lower<Self>>) -> Client;
}

fn properties(shared: usize, fill: impl FnOnce(&mut DeviceProperties)) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 30,
        max_shared_memory_size: shared,
        max_cube_count: (65535, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        max_vector_size: 4,
        num_streaming_multiprocessors: None,
        num_cpu_cores: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: Some(8),
    };
    let memory = MemoryDeviceProperties { max_page_size: 1 << 30, alignment: 256 };
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
    register_supported_types(&mut properties);
    properties.features.plane = Plane::Ops | Plane::Sync | Plane::NonUniformControlFlow;
    fill(&mut properties);
    properties
}

/// Metal 3.
#[derive(Clone, Debug, Default)]
pub(crate) struct Msl;

impl Target for Msl {
    const NAME: &'static str = "msl";
    const KIND: DeviceKind = DeviceKind::Metal;
    type C = MslCompiler;
    fn options() -> CompilationOptions {
        Default::default()
    }
    fn properties() -> DeviceProperties {
        properties(32768, |p| {
            // The real runtime does not advertise it.
            p.features.types.storage.remove(&ElemType::Float(FloatKind::BF16).into());
            register_wmma_features(MslDialect::supported_wmma_combinations(&MetalArchitecture::Metal3), p);
        })
    }
    fn wrap(client: ComputeClient<Lower<Self>>) -> Client {
        Client::LoweredMsl(client)
    }
}

/// An H100 or H200.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cuda90;

impl Target for Cuda90 {
    const NAME: &'static str = "cuda";
    const KIND: DeviceKind = DeviceKind::Cuda;
    type C = CppCompiler<CudaDialect<CudaWmmaCompiler>>;
    fn options() -> CompilationOptions {
        CompilationOptions {
            supports_features: CppSupportedFeatures {
                grid_constants: true,
                clusters: true,
                fast_math: true,
                fast_tanh: true,
                elect_sync: true,
            },
            ..Default::default()
        }
    }
    fn target() -> TargetProperties {
        <cubecl_cuda::CudaRuntime as Runtime>::target_properties()
    }
    fn properties() -> DeviceProperties {
        properties(227 * 1024, |p| {
            let arch = CudaArchitecture { version: 90 };
            register_wmma_features(CudaWmmaCompiler::supported_wmma_combinations(&arch), p);
            register_mma_features(CudaWmmaCompiler::supported_mma_combinations(&arch), p);
            p.features.copy_async = true;
            for kind in [FloatKind::F16, FloatKind::BF16] {
                p.features.matmul.ldmatrix.insert(ElemType::Float(kind).into());
            }
        })
    }
    fn wrap(client: ComputeClient<Lower<Self>>) -> Client {
        Client::LoweredCuda(client)
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct NoDevice<T>(PhantomData<T>);

impl<T: Target> Device for NoDevice<T> {
    fn from_id(_: DeviceId) -> Self {
        NoDevice(PhantomData)
    }
    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 900, index_id: 0 }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Lower<T>(PhantomData<T>);

impl<T: Target> Runtime for Lower<T> {
    type Compiler = T::C;
    type Server = LowerServer<T>;
    type Device = NoDevice<T>;
    fn client(device: &Self::Device) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }
    fn name(_: &ComputeClient<Self>) -> &'static str {
        T::NAME
    }
    fn require_array_lengths() -> bool {
        true
    }
    fn max_cube_count() -> (u32, u32, u32) {
        (65535, 65535, 65535)
    }
    fn can_read_tensor(_: &Shape, _: &Strides) -> bool {
        true
    }
    fn target_properties() -> TargetProperties {
        T::target()
    }
    fn enumerate_devices(_: u16, _: &()) -> Vec<DeviceId> {
        vec![DeviceId { type_id: 900, index_id: 0 }]
    }
}

#[derive(Debug)]
pub(crate) struct LowerServer<T: Target>(Arc<ServerUtilities<Self>>);

impl<T: Target> DeviceService for LowerServer<T> {
    fn init(_: DeviceId) -> Self {
        let policy = ContiguousMemoryLayoutPolicy::new(256);
        let logger = Arc::new(ServerLogger::default());
        LowerServer(Arc::new(ServerUtilities::new(T::properties(), logger, (), policy)))
    }
    fn utilities(&self) -> ServerUtilitiesHandle {
        self.0.clone()
    }
}

impl<T: Target> ServerCommunication for LowerServer<T> {
    const SERVER_COMM_ENABLED: bool = false;
}

fn no() -> ServerError {
    IoError::UnsupportedIoOperation { backtrace: BackTrace::capture() }.into()
}

impl<T: Target> ComputeServer for LowerServer<T> {
    type Kernel = Box<dyn CubeTask<T::C>>;
    type Info = ();
    type MemoryLayoutPolicy = ContiguousMemoryLayoutPolicy;
    type Storage = BytesStorage;
    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        _: CubeCount,
        _: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        let name = kernel.name();
        let lower = || {
            let address = kernel.address_type();
            kernel
                .compile(&mut T::C::default(), &T::options(), mode, address)
                .map(|c| c.source)
                .map_err(|e| e.to_string())
        };
        // An unsupported operation panics.
        let text = catch_unwind(AssertUnwindSafe(lower)).unwrap_or_else(|_| Err("lowering panicked".into()));
        TEXTS.lock().unwrap().push((T::NAME, name, text));
    }
    fn read(&mut self, d: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let zeros = d.iter().map(|c| Bytes::from_bytes_vec(vec![0; c.handle.size_in_used() as usize])).collect();
        Box::pin(async move { Ok(zeros) })
    }
    fn initialize_memory(&mut self, _: ManagedMemoryHandle, _: u64, _: StreamId) {}
    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}
    fn logger(&self) -> Arc<ServerLogger> {
        self.0.logger.clone()
    }
    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.0.clone()
    }
    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }
    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }
    fn get_resource(&mut self, _: Binding, _: StreamId) -> Result<ManagedResource<BytesResource>, ServerError> {
        Err(no())
    }
    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        Err(no())
    }
    fn memory_cleanup(&mut self, _: StreamId) {}
    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(no())
    }
    fn end_profile(&mut self, _: StreamId, _: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: BackTrace::capture() })
    }
}
