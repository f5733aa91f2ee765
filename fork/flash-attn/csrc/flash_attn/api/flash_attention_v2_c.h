/* Attention on NVIDIA GPUs, for C and for whatever calls C: forward and backward, in sequences of one length
 * or packed, on caches, with masks and biases. No framework is needed. docs/cpp.md is the reference.
 *
 * Every function returns a cudaError_t, prints nothing and throws nothing. What a failed call of this thread
 * was about, flash_attention_v2_last_error() says in words. Calls run on the current device, in the order of
 * the stream that they are given, and may be captured in a CUDA graph. Threads may call side by side.
 */
#ifndef FLASH_ATTENTION_V2_C_H
#define FLASH_ATTENTION_V2_C_H

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

/* Of this interface; the library's file is named after the first number. */
#define FLASH_ATTENTION_V2_VERSION_MAJOR 1
#define FLASH_ATTENTION_V2_VERSION_MINOR 1
#define FLASH_ATTENTION_V2_VERSION_PATCH 0
#define FLASH_ATTENTION_V2_VERSION "1.1.0"

#if defined(__GNUC__)
#define FLASH_ATTENTION_V2_API __attribute__((visibility("default")))
#else
#define FLASH_ATTENTION_V2_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum flash_attention_v2_dtype {
    FLASH_ATTENTION_V2_FLOAT16 = 0,
    FLASH_ATTENTION_V2_BFLOAT16 = 1,
    FLASH_ATTENTION_V2_FLOAT32 = 2,
    FLASH_ATTENTION_V2_INT32 = 3,
    FLASH_ATTENTION_V2_BOOL = 4 /* a byte: 0 or 1 */
} flash_attention_v2_dtype;

/* An array on the current device. All zeros: not given. */
typedef struct flash_attention_v2_tensor {
    void *data;
    int32_t dtype; /* flash_attention_v2_dtype */
    int32_t rank;  /* 1 to 4; 0: not given */
    int64_t sizes[4];
    int64_t strides[4]; /* in elements; the last must be 1, but for masks and biases */
} flash_attention_v2_tensor;

/* How scores become probabilities, and where chunks of keys end.
 *
 * b: sequences; h: heads of queries; h_k: heads of keys and values, which divide h; d: elements of a head. */
typedef struct flash_attention_v2_options {
    float softmax_scale;  /* of scores; 0: 1 / sqrt(d) */
    float softcap;        /* scores become softcap * tanh(score / softcap); 0: none */
    float dropout;        /* the share of probabilities that are dropped, from 0 to below 1 */
    int32_t causal;       /* 1: a query sees no key after it; the last query is with the last key */
    int32_t window_left;  /* keys before a query's own that it sees; -1: all */
    int32_t window_right; /* after it; -1: all */
    int64_t split_size; /* deterministic mode, in chunks of so many keys; 0: off; -1: as the process has it */
    uint64_t seed, offset;    /* of dropout's random numbers; the same in backward as in forward */
    const int64_t *seed_at;   /* where kernels find the seed instead, on the device; or null */
    const int64_t *offset_at; /* the same of the offset, to which offset is added then */
    flash_attention_v2_tensor alibi_slopes; /* (h) or (b, h), float32 */
    flash_attention_v2_tensor mask; /* bool, 1: a query sees a key; (b, h, queries, keys), or 1 for any */
    flash_attention_v2_tensor bias; /* added to scores; of q's dtype or float32; the same shapes */
    /* Since 1.1: a score without a key for each head of queries, which joins each row's softmax. */
    const void *learnable_sink;    /* (h), on the current device; or null */
    float *dsink;                  /* (h), of backward calls: its gradient, overwritten; or null */
    int64_t learnable_sink_stride; /* in elements; 0: 1 */
    int32_t learnable_sink_dtype;  /* flash_attention_v2_dtype: float16, bfloat16 or float32 */
    int32_t reserved_number;       /* 0 */
    int64_t reserved[4];           /* 0 */
} flash_attention_v2_options;

/* What a call does follows from what it is given. q of rank 4 and no field of the caches': sequences of one
 * length. q of rank 3: packed. q of rank 4 with any array of the caches' (cache_seqlens to block_table): k
 * and v are caches. Results overlap nothing, themselves included.
 *
 * flash_attention_v2_forward_defaults fills one in; a program then sets what it has. */
typedef struct flash_attention_v2_forward_call {
    size_t size; /* of this struct, as the program was compiled; the defaults set it */
    flash_attention_v2_options options;

    flash_attention_v2_tensor q;   /* (b, seqlen_q, h, d), or packed (total_q, h, d); float16 or bfloat16 */
    flash_attention_v2_tensor k;   /* (b, seqlen_k, h_k, d), or packed (total_k, h_k, d), or a cache:
                                      (b, capacity, h_k, d), or with block_table (pages, page size, h_k, d),
                                      of pages of a multiple of 16 tokens */
    flash_attention_v2_tensor v;   /* as k */
    flash_attention_v2_tensor out; /* as q: the result */
    flash_attention_v2_tensor lse; /* the log-sum-exp of each row of scores, float32: (b, h, seqlen_q), or
                                      packed (h, total_q); or not given, where no backward call follows */

    /* Packed sequences: where each begins. */
    flash_attention_v2_tensor cu_seqlens_q, cu_seqlens_k; /* (b + 1), int32, from 0 to the total */
    int32_t max_seqlen_q, max_seqlen_k;                   /* of the longest; never smaller */
    flash_attention_v2_tensor seqused_k;                  /* (b), int32: keys in use; or not given: all */
    int32_t zero_gaps; /* 1: out is 0, and lse -inf, in rows of no sequence; 0: behind the last sequence both
                          are 0, and other gaps are left alone */

    /* Caches. */
    flash_attention_v2_tensor cache_seqlens;   /* (b), int32: keys in a cache, before new ones */
    flash_attention_v2_tensor k_new, v_new;    /* (b, seqlen_new, h_k, d): appended to it first */
    flash_attention_v2_tensor rotary_cos;      /* (positions, rotary dim / 2), q's dtype: turns q and k_new */
    flash_attention_v2_tensor rotary_sin;      /* as rotary_cos */
    int32_t rotary_interleaved;                /* 1: pairs are neighbours; 0: halves of a head */
    int32_t num_splits;                        /* thread blocks that share a row's keys, with the mode off; 0:
                                                  as many as fill the GPU */
    flash_attention_v2_tensor cache_batch_idx; /* (b), int32: which sequence of the caches is whose */
    flash_attention_v2_tensor block_table;     /* (b, pages of a sequence), int32; also of packed calls */

    flash_attention_v2_tensor leftpad_k; /* (b), int32: keys at the beginning that are none */

    void *workspace; /* on the device, at a multiple of 256; null: memory is taken in the stream's order */
    size_t workspace_size;
} flash_attention_v2_forward_call;

/* Gradients of a forward call: the same q, k, v and options, with what that call wrote to out and lse. */
typedef struct flash_attention_v2_backward_call {
    size_t size;
    flash_attention_v2_options options;

    flash_attention_v2_tensor q, k, v, out, lse; /* of the forward call; not of caches */
    flash_attention_v2_tensor dout;              /* as out: its gradient */
    flash_attention_v2_tensor dq, dk, dv;        /* as q, k, v: the results */
    flash_attention_v2_tensor dbias;             /* as options.bias, contiguous; or not given */
    int32_t deterministic; /* 1: with the mode off, the same bits in each run, which takes longer */

    flash_attention_v2_tensor cu_seqlens_q, cu_seqlens_k; /* packed: as in the forward call */
    int32_t max_seqlen_q, max_seqlen_k;
    int32_t zero_gaps; /* 1: gradients are filled with 0 first; in rows of no sequence they are 0 anyway */

    void *workspace;
    size_t workspace_size;
} flash_attention_v2_backward_call;

/* init: get ready on the current device. The first call does it too; again it costs nothing.
 * cleanup: give back the memory that the library keeps for the next call, on every device. What launched work
 * still uses goes when it is waited for, unless another call comes first. */
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_init(void);
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_cleanup(void);

/* Fill a call in with what most programs want: no dropout, no window, the mode as the process has it.
 * size: sizeof the struct. cudaErrorInvalidValue: this library knows no such version of it. */
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_forward_defaults(
    flash_attention_v2_forward_call *call, size_t size);
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_backward_defaults(
    flash_attention_v2_backward_call *call, size_t size);

/* Launch a call. Statuses, but for cudaSuccess:
 *
 * - cudaErrorInvalidValue: a null pointer; a shape, dtype, stride or combination that no kernel takes; too
 *   small a workspace. Nothing was launched.
 * - cudaErrorNotSupported: what this build, or no build, has, such as a head dim or float32.
 * - cudaErrorNoDevice, cudaErrorInsufficientDriver: no GPU; a driver older than the library.
 * - cudaErrorNoKernelImageForDevice: this build has no code for the current device.
 * - cudaErrorMemoryAllocation: no memory for the workspace.
 * - Others: what CUDA answered. cudaErrorLaunchFailure and the like come from earlier work of the device. */
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_run_forward(
    const flash_attention_v2_forward_call *call, cudaStream_t stream);
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_run_backward(
    const flash_attention_v2_backward_call *call, cudaStream_t stream);

/* The bytes of workspace that a call takes; 0 is common. They depend on sizes, options and the device, not on
 * addresses; tensors need not have memory yet. */
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_forward_workspace(
    const flash_attention_v2_forward_call *call, size_t *bytes);
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_backward_workspace(
    const flash_attention_v2_backward_call *call, size_t *bytes);

/* Several GPUs: each computes sequences, or heads, of its own, and nothing is sent between them.
 *
 * part: the share [*begin, *end) of part `index` of `count` of so many sequences or heads, as equal as can
 * be, in multiples of `granule` (for heads of queries h / h_k, so that a group stays whole; else 1).
 * ..._on_devices: runs calls[i] on devices[i] in streams[i], one after the other on this thread, and leaves
 * the current device as it was. It stops at the first error. streams null: the default stream of each. */
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_part(
    int64_t length, int64_t granule, int count, int index, int64_t *begin, int64_t *end);
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_forward_on_devices(
    const flash_attention_v2_forward_call *calls, const int *devices, const cudaStream_t *streams, int count);
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_backward_on_devices(
    const flash_attention_v2_backward_call *calls, const int *devices, const cudaStream_t *streams,
    int count);

/* The process-wide deterministic mode. FA2_DETERMINISTIC=1 and FA2_SPLIT_SIZE in the environment do the same.
 * split_size: tokens of a chunk, a multiple of 128 (64 at some head dims); 0: the default. */
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_set_deterministic(int enabled, int64_t split_size);
FLASH_ATTENTION_V2_API cudaError_t flash_attention_v2_get_deterministic(int *enabled, int64_t *split_size);

/* Which kernels this build has. has_kernels: 1 where a head dim and dtype has those of the pass (0: forward,
 * 1: backward). kernels: their names, one a line; the text is the library's. */
FLASH_ATTENTION_V2_API int flash_attention_v2_has_kernels(int head_dim, int dtype, int pass);
FLASH_ATTENTION_V2_API const char *flash_attention_v2_kernels(void);

/* FLASH_ATTENTION_V2_VERSION, as the library was compiled. */
FLASH_ATTENTION_V2_API const char *flash_attention_v2_version(void);

/* What this thread's last call that failed was about, until its next call; "" after one that succeeded. */
FLASH_ATTENTION_V2_API const char *flash_attention_v2_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
