#include "values.h"

#include <climits>

#include "fork_runtime.h"

namespace FLASH_NAMESPACE {
namespace core {

namespace {

enum What { kNothing, kStart, kFalls, kTotal, kLength, kSequence, kPage };

// The first place that is wrong: what, which table, where, and the value.
struct Found {
    int what, table, at, value, column;
};

__device__ void note(Found *found, const Found &wrong) {
    if (found->what == kNothing) { *found = wrong; }
}

__device__ void check_sums(
    Found *found, const int table, const int *sums, const int count, const int64_t total) {
    if (sums == nullptr) { return; }
    if (sums[0] != 0) { note(found, {kStart, table, 0, sums[0], 0}); }
    for (int i = 1; i < count; ++i) {
        if (sums[i] < sums[i - 1]) { note(found, {kFalls, table, i, sums[i], 0}); }
    }
    if (total >= 0 && sums[count - 1] > total) {
        note(found, {kTotal, table, count - 1, sums[count - 1], 0});
    }
}

struct Pointers {
    const int *cu_seqlens_q, *cu_seqlens_k, *lengths, *cache_batch_idx, *block_table;
    int batch, columns, page_size;
    int64_t total_q, total_k, capacity, new_keys, sequences, pages, row_stride;
};

// One thread: this is for finding mistakes, in the order in which a person would look for them.
__global__ void find_wrong_kernel(const Pointers p, Found *found) {
    *found = {};
    check_sums(found, 0, p.cu_seqlens_q, p.batch + 1, p.total_q);
    check_sums(found, 1, p.cu_seqlens_k, p.batch + 1, p.total_k);
    for (int b = 0; b < p.batch; ++b) {
        if (p.lengths != nullptr && p.capacity >= 0
            && (p.lengths[b] < 0 || p.lengths[b] + p.new_keys > p.capacity)) {
            note(found, {kLength, 2, b, p.lengths[b], 0});
        }
        if (p.cache_batch_idx != nullptr
            && (p.cache_batch_idx[b] < 0 || p.cache_batch_idx[b] >= p.sequences)) {
            note(found, {kSequence, 3, b, p.cache_batch_idx[b], 0});
        }
    }
    if (p.block_table == nullptr || found->what != kNothing) { return; }
    for (int b = 0; b < p.batch; ++b) {
        const int64_t length = p.lengths != nullptr ? p.lengths[b] + p.new_keys
            : p.cu_seqlens_k != nullptr             ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]
                                                    : p.capacity;
        for (int i = 0; i < p.columns && int64_t(i) * p.page_size < length; ++i) {
            const int page = p.block_table[b * p.row_stride + i];
            if (page < 0 || page >= p.pages) { note(found, {kPage, 4, b, page, i}); }
        }
    }
}

void raise(const Found &found, const Tables &tables) {
    const char *names[] = {
        "cu_seqlens_q", "cu_seqlens_k", tables.lengths_name, "cache_batch_idx", "block_table"};
    const std::string place = text_of("FA2_CHECK: ", names[found.table], "[", found.at,
        found.what == kPage ? text_of(", ", found.column) : std::string(), "] is ", found.value, "; ");
    const int64_t total = found.table == 0 ? tables.total_q : tables.total_k;
    FORK_CHECK_VALUE(found.what != kStart, place, "it must begin at 0");
    FORK_CHECK_VALUE(found.what != kFalls, place, "it must not be less than the number before");
    FORK_CHECK_VALUE(found.what != kTotal, place, "there are ", total, " tokens");
    FORK_CHECK_VALUE(found.what != kLength, place, "it must be from 0 to ", tables.capacity - tables.new_keys,
        tables.new_keys > 0
            ? text_of(": the cache has ", tables.capacity, ", and ", tables.new_keys, " are appended")
            : std::string());
    FORK_CHECK_VALUE(found.what != kSequence, place, "the cache has ", tables.sequences, " sequences");
    FORK_CHECK_VALUE(found.what != kPage, place, "the pool has ", tables.pages, " pages");
}

// Where nobody may wait. Of the stream that all wait for, CUDA says by an error that another is captured.
bool in_capture(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
        return status != cudaStreamCaptureStatusNone;
    }
    cudaGetLastError();  // forgets it
    return true;
}

const int *data_of(const Tensor &tensor) { return tensor.given() ? tensor.as<int>() : nullptr; }

}  // namespace

void check_values(const Tables &tables, Scratch &scratch, const Host &host) {
    const Tensor *given[] = {
        &tables.cu_seqlens_q, &tables.lengths, &tables.cache_batch_idx, &tables.block_table};
    int64_t batch = -1;
    for (const Tensor *table : given) {
        if (batch < 0 && table->given()) { batch = table->size(0) - (table == given[0] ? 1 : 0); }
    }
    if (batch < 0) { return; }
    if (host.measured == nullptr && in_capture(host.stream)) {
        host.warn(host.context,
            "FA2_CHECK=1 does not look into the tables of calls that a CUDA graph captures: nobody may wait "
            "for the GPU there");
        return;
    }
    const size_t at = scratch.reserve(sizeof(Found));
    scratch.allocate(host);
    if (host.measured != nullptr) { return; }
    const Pointers pointers{data_of(tables.cu_seqlens_q), data_of(tables.cu_seqlens_k),
        data_of(tables.lengths), data_of(tables.cache_batch_idx), data_of(tables.block_table), int(batch),
        tables.block_table.given() ? int(tables.block_table.size(1)) : 0, int(tables.page_size),
        tables.total_q, tables.total_k, tables.capacity, tables.new_keys, tables.sequences, tables.pages,
        tables.block_table.given() ? tables.block_table.stride(0) : 0};
    Found *const on_gpu = scratch.at<Found>(at);
    find_wrong_kernel<<<1, 1, 0, host.stream>>>(pointers, on_gpu);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    Found found;
    FORK_CHECK_CUDA(cudaMemcpyAsync(&found, on_gpu, sizeof(found), cudaMemcpyDeviceToHost, host.stream));
    FORK_CHECK_CUDA(cudaStreamSynchronize(host.stream));
    raise(found, tables);
}

}  // namespace core
}  // namespace FLASH_NAMESPACE
