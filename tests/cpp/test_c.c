/* The header is C: this file would not compile otherwise, nor link. test_reference.cpp's neighbours call it.
 */

#include <string.h>

#include "flash_attention_v2_c.h"

_Static_assert(sizeof(flash_attention_v2_tensor) == 80, "programs of 1.0 have it so");
_Static_assert(sizeof(flash_attention_v2_options) == 368, "programs of 1.0 have it so");
_Static_assert(sizeof(flash_attention_v2_forward_call) == 1696, "programs of 1.0 have it so");
_Static_assert(sizeof(flash_attention_v2_backward_call) == 1376, "programs of 1.0 have it so");
#if FLASH_ATTENTION_V2_VERSION_MAJOR != 1 || FLASH_ATTENTION_V2_VERSION_MINOR < 1
#error the version is told in numbers too
#endif

int c_program_works(void);

int c_program_works(void) {
    flash_attention_v2_forward_call call;
    flash_attention_v2_backward_call backward;
    int64_t begin = -1, end = -1;
    if (flash_attention_v2_forward_defaults(&call, sizeof(call)) != cudaSuccess) { return 0; }
    if (flash_attention_v2_backward_defaults(&backward, sizeof(backward)) != cudaSuccess) { return 0; }
    if (call.size != sizeof(call) || call.options.window_left != -1 || call.options.split_size != -1) {
        return 0;
    }
    if (flash_attention_v2_part(7, 1, 2, 1, &begin, &end) != cudaSuccess || begin != 4 || end != 7) {
        return 0;
    }
    const cudaError_t ready = flash_attention_v2_init(); /* which needs a GPU */
    if (ready == cudaErrorInvalidValue || flash_attention_v2_cleanup() != cudaSuccess) { return 0; }
    return strcmp(flash_attention_v2_version(), FLASH_ATTENTION_V2_VERSION) == 0;
}
