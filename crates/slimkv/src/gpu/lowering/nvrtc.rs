//! Compiling CUDA source with no GPU.

use std::ffi::CString;

use cudarc::nvrtc::{result, sys};

/// PTX, or what the compiler says; `None` where there is no compiler.
pub(super) fn compile(source: &str) -> Option<Result<String, String>> {
    // SAFETY: only tries to load the library.
    if !unsafe { sys::is_culib_present() } || cubecl_cuda::install::cuda_path().is_none() {
        return None;
    }
    let include = cubecl_cuda::install::include_path();
    let program = result::create_program(CString::new(source).ok()?.as_c_str(), None).ok()?;
    let options = [
        "--gpu-architecture=sm_90a".to_string(),
        format!("--include-path={}", include.display()),
        format!("--include-path={}", include.join("cccl").display()),
    ];
    // SAFETY: `program` was created above and is used by this thread alone.
    let compiled = unsafe { result::compile_program(program, &options) }.is_ok();
    // SAFETY: as above; the text is ready once the compiler has returned.
    let text = unsafe { if compiled { result::get_ptx(program) } else { result::get_program_log(program) } };
    let bytes: Vec<u8> = text.ok()?.into_iter().map(|c| c as u8).collect();
    let text = String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string();
    // SAFETY: not used after this.
    let _ = unsafe { result::destroy_program(program) };
    Some(if compiled { Ok(text) } else { Err(text) })
}
