//! Contiguous arrays on one device.

use std::any::Any;
use std::sync::Arc;

use crate::{DType, Device, Element, Error, Result};

/// A contiguous row-major array of one dtype on one device. Cloning shares the memory.
///
/// ```
/// use slimkv::{Device, Tensor};
/// let t = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;   // takes the vector, copies nothing
/// assert_eq!(t.shape(), [2, 3]);
/// assert_eq!(t.as_slice::<f32>()?[4], 5.0);
/// let there = t.to_device(&Device::best())?;
/// assert_eq!(there.to_vec::<f32>()?, t.to_vec::<f32>()?);
/// # Ok::<(), slimkv::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Arc<[usize]>,
    storage: Storage,
}

#[derive(Clone)]
enum Storage {
    Host(HostMemory),
    #[cfg(feature = "gpu")]
    Gpu(crate::gpu::Buffer),
}

/// Host bytes: our own aligned allocation, or memory that somebody else owns and we keep alive.
#[derive(Clone)]
enum HostMemory {
    Owned(Arc<AlignedBytes>),
    Shared {
        /// Keeps the memory alive.
        #[allow(dead_code)]
        owner: Arc<dyn Any + Send + Sync>,
        ptr: *const u8,
        len: usize,
    },
}

// SAFETY: `Shared` points into `owner`, which is `Send + Sync`, is kept alive by the same value and is only read.
unsafe impl Send for HostMemory {}
// SAFETY: as above; no method hands out mutable access to `Shared` memory.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn bytes(&self) -> &[u8] {
        match self {
            HostMemory::Owned(bytes) => bytes.as_slice(),
            // SAFETY: `ptr` and `len` came from a slice inside `owner`, which lives as long as `self`.
            HostMemory::Shared { ptr, len, owner: _ } => unsafe { std::slice::from_raw_parts(*ptr, *len) },
        }
    }
}

/// Zeroed bytes on a 64-byte boundary, so that a SIMD register never straddles a cache line at a row start.
struct AlignedBytes {
    ptr: std::ptr::NonNull<u8>,
    len: usize,
}

// SAFETY: `AlignedBytes` owns its allocation as `Box<[u8]>` would.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above.
unsafe impl Sync for AlignedBytes {}

/// Only its alignment is of use: the address of an empty allocation.
#[repr(align(64))]
struct Line;

impl AlignedBytes {
    const ALIGN: usize = 64;

    fn layout(len: usize) -> Option<std::alloc::Layout> {
        std::alloc::Layout::from_size_align(len, Self::ALIGN).ok()
    }

    /// `None` when the system has no memory for it.
    fn zeroed(len: usize) -> Option<Self> {
        if len == 0 {
            return Some(AlignedBytes { ptr: std::ptr::NonNull::<Line>::dangling().cast(), len });
        }
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { std::alloc::alloc_zeroed(Self::layout(len)?) };
        Some(AlignedBytes { ptr: std::ptr::NonNull::new(ptr)?, len })
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes (or dangling with `len` 0).
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.len != 0 {
            let layout = Self::layout(self.len).expect("the layout was valid when it was allocated");
            // SAFETY: allocated by `zeroed` with this very layout.
            unsafe { std::alloc::dealloc(self.ptr.as_ptr(), layout) }
        }
    }
}

impl Tensor {
    /// Zeros of the given dtype and shape on `device`.
    pub fn zeros(dtype: DType, shape: &[usize], device: &Device) -> Result<Self> {
        let bytes = byte_len("Tensor::zeros", dtype, shape)?;
        let storage = match device.gpu() {
            None => Storage::Host(HostMemory::Owned(Arc::new(AlignedBytes::zeroed(bytes).ok_or_else(|| {
                Error::DeviceFailed {
                    op: "Tensor::zeros",
                    device: device.clone(),
                    reason: format!("no memory for {bytes} bytes"),
                }
            })?))),
            #[cfg(feature = "gpu")]
            Some(gpu) => Storage::Gpu(gpu.zeroed(bytes)?),
            #[cfg(not(feature = "gpu"))]
            Some(never) => match *never {},
        };
        Ok(Tensor { dtype, shape: shape.into(), storage })
    }

    /// Takes a vector as a CPU tensor. Nothing is copied.
    pub fn from_vec<T: Element>(data: Vec<T>, shape: &[usize]) -> Result<Self> {
        Self::from_owner::<T, Vec<T>>(data, shape)
    }

    /// Takes anything that holds a slice - a vector, an `Arc<[f32]>`, a memory map behind a wrapper - as a CPU tensor and
    /// keeps it alive. Nothing is copied.
    ///
    /// ```
    /// use slimkv::Tensor;
    /// let shared: std::sync::Arc<[f32]> = vec![0.5; 8].into();
    /// let t = Tensor::from_owner::<f32, _>(shared.clone(), &[2, 4])?;
    /// assert_eq!(t.as_slice::<f32>()?.as_ptr(), shared.as_ptr());
    /// # Ok::<(), slimkv::Error>(())
    /// ```
    pub fn from_owner<T: Element, O: AsRef<[T]> + Send + Sync + 'static>(owner: O, shape: &[usize]) -> Result<Self> {
        let owner = Arc::new(owner);
        let slice = (*owner).as_ref();
        check_len("Tensor::from_owner", slice.len(), shape)?;
        let bytes: &[u8] = bytemuck::cast_slice(slice);
        let (ptr, len) = (bytes.as_ptr(), bytes.len());
        Ok(Tensor {
            dtype: T::DTYPE,
            shape: shape.into(),
            storage: Storage::Host(HostMemory::Shared { owner, ptr, len }),
        })
    }

    /// Copies a host slice to `device`.
    pub fn from_slice<T: Element>(data: &[T], shape: &[usize], device: &Device) -> Result<Self> {
        check_len("Tensor::from_slice", data.len(), shape)?;
        Self::from_bytes(T::DTYPE, bytemuck::cast_slice(data), shape, device)
    }

    /// Copies raw little-endian bytes (of a file, say) to `device`.
    pub fn from_bytes(dtype: DType, bytes: &[u8], shape: &[usize], device: &Device) -> Result<Self> {
        let expected = byte_len("Tensor::from_bytes", dtype, shape)?;
        if bytes.len() != expected {
            return Err(Error::value("Tensor::from_bytes", "bytes", format!("{expected} bytes"), bytes.len()));
        }
        match device.gpu() {
            None => {
                let mut tensor = Self::zeros(dtype, shape, device)?;
                tensor.host_bytes_mut()?.copy_from_slice(bytes);
                Ok(tensor)
            }
            #[cfg(feature = "gpu")]
            Some(gpu) => Ok(Tensor { dtype, shape: shape.into(), storage: Storage::Gpu(gpu.upload(bytes)?) }),
            #[cfg(not(feature = "gpu"))]
            Some(never) => match *never {},
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements in all.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that the elements occupy on the device.
    pub fn byte_len(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// The device that holds the elements.
    pub fn device(&self) -> Device {
        match &self.storage {
            Storage::Host(_) => Device::cpu(),
            #[cfg(feature = "gpu")]
            Storage::Gpu(buffer) => Device::from_gpu(buffer.gpu().clone()),
        }
    }

    /// The same elements under another shape of the same size.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self> {
        check_len("Tensor::reshape", self.len(), shape)?;
        Ok(Tensor { shape: shape.into(), ..self.clone() })
    }

    /// The elements in place; an error off the CPU, or for another dtype.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.expect_dtype(T::DTYPE)?;
        bytemuck::try_cast_slice(self.host_bytes()?)
            .map_err(|e| Error::value("Tensor::as_slice", "self", "memory aligned for its dtype", e))
    }

    /// The elements in place, to be changed. Memory that another tensor or owner shares is copied first.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.expect_dtype(T::DTYPE)?;
        Ok(bytemuck::cast_slice_mut(self.host_bytes_mut()?))
    }

    /// Copies the elements to the host.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.expect_dtype(T::DTYPE)?;
        Ok(bytemuck::allocation::pod_collect_to_vec(&self.to_bytes()?))
    }

    /// Copies the raw little-endian bytes to the host.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        match &self.storage {
            Storage::Host(memory) => Ok(memory.bytes().to_vec()),
            #[cfg(feature = "gpu")]
            Storage::Gpu(buffer) => buffer.download(),
        }
    }

    /// The elements as f32, converted exactly. An error for integers.
    pub fn to_f32_vec(&self) -> Result<Vec<f32>> {
        let bytes = self.to_bytes()?;
        crate::dtype::with_float!(self.dtype, T => {
            let values: Vec<T> = bytemuck::allocation::pod_collect_to_vec(&bytes);
            Ok(values.into_iter().map(crate::FloatElement::to_f32).collect())
        }, else Err(Error::dtype("Tensor::to_f32_vec", "self", "f16, bf16 or f32", self.dtype)))
    }

    /// The same elements on another device; shares the memory when they are there already.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        if self.device() == *device {
            return Ok(self.clone());
        }
        match &self.storage {
            Storage::Host(memory) => Self::from_bytes(self.dtype, memory.bytes(), &self.shape, device),
            #[cfg(feature = "gpu")]
            Storage::Gpu(buffer) => Self::from_bytes(self.dtype, &buffer.download()?, &self.shape, device),
        }
    }

    /// The elements rounded to another float dtype (to nearest, ties to even), on the host's side of the device.
    pub fn to_float(&self, dtype: DType) -> Result<Self> {
        if self.dtype == dtype {
            return Ok(self.clone());
        }
        let values = self.to_f32_vec()?;
        crate::dtype::with_float!(dtype, T => {
            let cast: Vec<T> = values.into_iter().map(<T as crate::FloatElement>::from_f32).collect();
            Self::from_vec(cast, &self.shape)?.to_device(&self.device())
        }, else Err(Error::dtype("Tensor::to_float", "dtype", "f16, bf16 or f32", dtype)))
    }

    /// The GPU buffer behind the elements.
    #[cfg(feature = "gpu")]
    pub(crate) fn gpu_buffer(&self) -> Option<&crate::gpu::Buffer> {
        match &self.storage {
            Storage::Host(_) => None,
            Storage::Gpu(buffer) => Some(buffer),
        }
    }

    /// A tensor over a buffer that a kernel filled.
    #[cfg(feature = "gpu")]
    pub(crate) fn from_gpu_buffer(dtype: DType, shape: &[usize], buffer: crate::gpu::Buffer) -> Self {
        debug_assert_eq!(shape.iter().product::<usize>() * dtype.size(), buffer.len());
        Tensor { dtype, shape: shape.into(), storage: Storage::Gpu(buffer) }
    }

    fn expect_dtype(&self, dtype: DType) -> Result<()> {
        if self.dtype == dtype { Ok(()) } else { Err(Error::dtype("Tensor", "self", dtype.name(), self.dtype)) }
    }

    fn host_bytes(&self) -> Result<&[u8]> {
        match &self.storage {
            Storage::Host(memory) => Ok(memory.bytes()),
            #[cfg(feature = "gpu")]
            Storage::Gpu(_) => Err(Error::DeviceMismatch {
                op: "Tensor::as_slice",
                arg: "self",
                expected: Device::cpu(),
                found: self.device(),
            }),
        }
    }

    fn host_bytes_mut(&mut self) -> Result<&mut [u8]> {
        let unique = match &mut self.storage {
            Storage::Host(HostMemory::Owned(bytes)) => Arc::get_mut(bytes).is_some(),
            _ => false,
        };
        if !unique {
            let bytes = self.host_bytes()?;
            let mut copy = AlignedBytes::zeroed(bytes.len()).ok_or_else(|| Error::DeviceFailed {
                op: "Tensor::as_mut_slice",
                device: Device::cpu(),
                reason: format!("no memory for {} bytes", bytes.len()),
            })?;
            copy.as_mut_slice().copy_from_slice(bytes);
            self.storage = Storage::Host(HostMemory::Owned(Arc::new(copy)));
        }
        match &mut self.storage {
            Storage::Host(HostMemory::Owned(bytes)) => {
                Ok(Arc::get_mut(bytes).expect("made unique above").as_mut_slice())
            }
            _ => unreachable!("made an owned host allocation above"),
        }
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} {:?} on {})", self.dtype, self.shape, self.device())
    }
}

fn byte_len(op: &'static str, dtype: DType, shape: &[usize]) -> Result<usize> {
    shape
        .iter()
        .try_fold(dtype.size(), |bytes, &n| bytes.checked_mul(n))
        .filter(|&bytes| bytes <= isize::MAX as usize)
        .ok_or_else(|| Error::shape(op, "shape", "fewer bytes than the address space", shape))
}

fn check_len(op: &'static str, len: usize, shape: &[usize]) -> Result<()> {
    match shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) {
        Some(n) if n == len => Ok(()),
        _ => Err(Error::shape(op, "shape", format!("of {len} elements"), shape)),
    }
}
