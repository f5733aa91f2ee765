// Causal attention from Rust, without bindgen or crates. The first token sees itself alone, so its row of the
// result is its value: the program checks that.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::{process, ptr};

const TOKENS: usize = 128;
const HEADS: usize = 4;
const DIM: usize = 64;
const COUNT: usize = TOKENS * HEADS * DIM;

#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor { data: *mut c_void, dtype: i32, rank: i32, sizes: [i64; 4], strides: [i64; 4] }

#[repr(C)]
#[derive(Clone, Copy)]
struct Options {
    softmax_scale: f32, softcap: f32, dropout: f32,
    causal: i32, window_left: i32, window_right: i32,
    split_size: i64, seed: u64, offset: u64, seed_at: *const i64, offset_at: *const i64,
    alibi_slopes: Tensor, mask: Tensor, bias: Tensor, reserved: [i64; 8],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ForwardCall {
    size: usize, options: Options,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: i32, max_seqlen_k: i32,
    seqused_k: Tensor, zero_gaps: i32,
    cache_seqlens: Tensor, k_new: Tensor, v_new: Tensor, rotary_cos: Tensor, rotary_sin: Tensor,
    rotary_interleaved: i32, num_splits: i32,
    cache_batch_idx: Tensor, block_table: Tensor, leftpad_k: Tensor,
    workspace: *mut c_void, workspace_size: usize,
}

extern "C" {
    fn flash_attention_v2_forward_defaults(call: *mut ForwardCall, size: usize) -> c_int;
    fn flash_attention_v2_run_forward(call: *const ForwardCall, stream: *mut c_void) -> c_int;
    fn flash_attention_v2_last_error() -> *const c_char;
    fn cudaMalloc(at: *mut *mut c_void, bytes: usize) -> c_int;
    fn cudaMemcpy(to: *mut c_void, from: *const c_void, bytes: usize, kind: c_int) -> c_int;
    fn cudaGetErrorString(status: c_int) -> *const c_char;
    fn cudaFree(at: *mut c_void) -> c_int;
}

fn check(status: c_int, what: &str) {
    if status == 0 { return; }
    let (ours, cudas) = unsafe { (flash_attention_v2_last_error(), cudaGetErrorString(status)) };
    let [ours, cudas] = [ours, cudas].map(|words| unsafe { CStr::from_ptr(words) }.to_string_lossy());
    eprintln!("{what}: error {status}: {}", if ours.is_empty() { cudas } else { ours });
    process::exit(1);
}

fn rows(content: Option<&[u16]>) -> Tensor {
    let mut data = ptr::null_mut();
    check(unsafe { cudaMalloc(&mut data, 2 * COUNT) }, "cudaMalloc");
    if let Some(numbers) = content {
        // 1: to the device
        check(unsafe { cudaMemcpy(data, numbers.as_ptr().cast(), 2 * COUNT, 1) }, "cudaMemcpy");
    }
    let sizes = [1, TOKENS as i64, HEADS as i64, DIM as i64];
    let strides = [COUNT as i64, (HEADS * DIM) as i64, DIM as i64, 1];
    Tensor { data, dtype: 0, rank: 4, sizes, strides } // 0: float16
}

fn main() {
    let numbers: Vec<u16> = (0..COUNT).map(|i| 0x3000 + (i * 37 % 0x0c00) as u16).collect(); // 0.125 to 1
    let mut call: ForwardCall = unsafe { std::mem::zeroed() };
    let size = std::mem::size_of::<ForwardCall>();
    check(unsafe { flash_attention_v2_forward_defaults(&mut call, size) }, "defaults");
    call.options.causal = 1;
    (call.q, call.k, call.v) = (rows(Some(&numbers)), rows(Some(&numbers)), rows(Some(&numbers)));
    call.out = rows(None);
    check(unsafe { flash_attention_v2_run_forward(&call, ptr::null_mut()) }, "forward");
    let mut out = vec![0u16; COUNT];
    // 2: from it
    check(unsafe { cudaMemcpy(out.as_mut_ptr().cast(), call.out.data, 2 * COUNT, 2) }, "cudaMemcpy");
    assert_eq!(out[..HEADS * DIM], numbers[..HEADS * DIM], "the first row is not its value");
    println!("{TOKENS} rows; the first is its value, as it should be");
    for tensor in [call.q, call.k, call.v, call.out] { unsafe { cudaFree(tensor.data) }; }
}
