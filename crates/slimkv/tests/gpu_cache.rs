//! The cache of compiled kernels: one test, for it is a setting of the whole process.

mod gpu;

use slimkv::gpu::{HeadShape, enable_kernel_cache, kernel_cache, warm};
use slimkv::{Device, DeviceKind};

#[test]
fn compiled_kernels_are_kept() {
    let dir = std::env::temp_dir().join(format!("slimkv-kernels-{}", std::process::id()));
    let folder = enable_kernel_cache(Some(dir.clone())).unwrap();
    assert!(folder.starts_with(&dir), "{folder:?}");
    assert!(folder.to_string_lossy().contains(env!("CARGO_PKG_VERSION")), "{folder:?}");
    assert_eq!(enable_kernel_cache(None).unwrap(), folder, "a second call keeps the first folder");
    for device in gpu::devices() {
        let before = kernel_cache().unwrap();
        let warmed = warm(&device, &[HeadShape { head_dim: 8, group: 1 }]).unwrap();
        assert!(warmed.operations > 0);
        let after = kernel_cache().unwrap();
        assert!(after.enabled && after.folder == folder);
        // Metal keeps compiled kernels in its driver.
        if device.kind() != DeviceKind::Metal {
            assert!(after.entries > before.entries && after.bytes > before.bytes, "{device}: {after:?}");
        }
    }
    assert_eq!(warm(&Device::cpu(), &slimkv::gpu::COMMON).unwrap().operations, 0);
    std::fs::remove_dir_all(dir).unwrap();
}
