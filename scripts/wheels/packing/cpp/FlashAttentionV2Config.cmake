# For find_package(FlashAttentionV2): gives the target FlashAttentionV2::flash_attention_v2.
#
# Programs need CUDA's headers besides. They are looked for in FlashAttentionV2_CUDA_INCLUDE_DIR, CUDAToolkit_ROOT,
# CUDA_HOME, CUDA_PATH, the packages of the Python that a wheel is installed for, and where FindCUDAToolkit looks. That
# module finds no toolkit that lacks libcudart.so, such as those of package indexes; headers are enough here.

get_filename_component(_flash_attention_v2_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT CUDAToolkit_FOUND)
  find_package(CUDAToolkit QUIET)
endif()
find_path(FlashAttentionV2_CUDA_INCLUDE_DIR
  NAMES cuda_runtime_api.h
  HINTS ${CUDAToolkit_INCLUDE_DIRS} ${CUDAToolkit_ROOT} ENV CUDA_HOME ENV CUDA_PATH @PACKAGES@
  PATHS /usr/local/cuda
  PATH_SUFFIXES include
  DOC "The folder of CUDA's headers")
mark_as_advanced(FlashAttentionV2_CUDA_INCLUDE_DIR)

set(_flash_attention_v2_lacks "")
if(NOT FlashAttentionV2_CUDA_INCLUDE_DIR)
  set(_flash_attention_v2_lacks "CUDA's headers (cuda_runtime_api.h) were not found")
elseif(NOT EXISTS "${FlashAttentionV2_CUDA_INCLUDE_DIR}/crt/host_defines.h")
  set(_flash_attention_v2_lacks "${FlashAttentionV2_CUDA_INCLUDE_DIR} lacks crt/host_defines.h (of the Python packages, \
nvidia-cuda-crt has it for CUDA 13, and nvidia-cuda-nvcc-cu12 for CUDA 12)")
elseif(NOT EXISTS "${FlashAttentionV2_CUDA_INCLUDE_DIR}/nv/target" AND
       NOT EXISTS "${FlashAttentionV2_CUDA_INCLUDE_DIR}/cccl/nv/target")
  set(_flash_attention_v2_lacks "${FlashAttentionV2_CUDA_INCLUDE_DIR} lacks nv/target (of the Python packages, \
nvidia-cuda-cccl has it for CUDA 13, and nvidia-cuda-cccl-cu12 for CUDA 12)")
endif()
if(_flash_attention_v2_lacks)
  set(FlashAttentionV2_FOUND FALSE)
  set(FlashAttentionV2_NOT_FOUND_MESSAGE "${_flash_attention_v2_lacks}. Install the CUDA toolkit, or set CUDA_HOME, or \
-DFlashAttentionV2_CUDA_INCLUDE_DIR=FOLDER.")
else()
  include("${CMAKE_CURRENT_LIST_DIR}/FlashAttentionV2Targets.cmake")
endif()
unset(_flash_attention_v2_lacks)
unset(_flash_attention_v2_prefix)
