//! The bytes that a cache reports are the bytes that the allocator gave it. One test, alone in its process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use slimkv::cache::{Geometry, KvCache};
use slimkv::{DType, Device, Tensor};

/// Bytes of live allocations of a page or more: rows, not bookkeeping.
static LARGE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

fn counted(layout: Layout) -> usize {
    if layout.size() >= 4096 { layout.size() } else { 0 }
}

// SAFETY: every call is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGE.fetch_add(counted(layout), SeqCst);
        // SAFETY: the caller's promise is the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGE.fetch_add(counted(layout), SeqCst);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LARGE.fetch_sub(counted(layout), SeqCst);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn reported_bytes_are_allocated_bytes() {
    let device = Device::cpu();
    let geometry = Geometry { layers: 4, kv_heads: 2, head_dim: 128, batch: 2 };
    for text in ["fp16", "kivi:8", "kivi:4", "kivi:3", "kivi:2,group=64", "kivi:k4v2,residual=0", "kivi:2,first=1:fp16"]
    {
        let k = Tensor::zeros(DType::F32, &[2, 2, 100, 128], &device).unwrap();
        let q = Tensor::zeros(DType::F32, &[2, 4, 1, 128], &device).unwrap();
        // The first call of everything may build tables and threads, which stay.
        let mut warm_up = KvCache::new(text.parse().unwrap(), geometry, &device).unwrap();
        warm_up.layer(0).append(&k, &k).unwrap();
        warm_up.layer(0).attend(&q, 1.0).unwrap();
        drop(warm_up);
        let before = LARGE.load(SeqCst);
        let mut cache = KvCache::new(text.parse().unwrap(), geometry, &device).unwrap();
        for _ in 0..25 {
            for layer in 0..geometry.layers {
                cache.layer(layer).append(&k, &k).unwrap();
                drop(cache.layer(layer).attend(&q, 1.0).unwrap());
            }
            let allocated = LARGE.load(SeqCst) - before;
            assert_eq!(cache.bytes(), allocated, "{text} after {} tokens", cache.len());
        }
        cache.clear();
        assert_eq!(LARGE.load(SeqCst), before, "{text}: clear gives the memory back");
    }
}
