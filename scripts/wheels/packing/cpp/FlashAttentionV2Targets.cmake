# Included by FlashAttentionV2Config.cmake, which finds CUDA's headers.

if(NOT TARGET FlashAttentionV2::flash_attention_v2)
  add_library(FlashAttentionV2::flash_attention_v2 SHARED IMPORTED)
  set_target_properties(FlashAttentionV2::flash_attention_v2 PROPERTIES
    IMPORTED_LOCATION "${_flash_attention_v2_prefix}/lib/@LIBRARY@"
    IMPORTED_SONAME "@LIBRARY@"
    INTERFACE_INCLUDE_DIRECTORIES "${_flash_attention_v2_prefix}/include;${FlashAttentionV2_CUDA_INCLUDE_DIR}")
  if(EXISTS "${FlashAttentionV2_CUDA_INCLUDE_DIR}/cccl/nv/target")  # where CUDA 13 has it
    set_property(TARGET FlashAttentionV2::flash_attention_v2 APPEND PROPERTY
      INTERFACE_INCLUDE_DIRECTORIES "${FlashAttentionV2_CUDA_INCLUDE_DIR}/cccl")
  endif()
  if(@NEEDS_RUNTIME@ AND TARGET CUDA::cudart)
    # Else the linker looks for it where the library does: in the packages that torch depends on.
    set_target_properties(FlashAttentionV2::flash_attention_v2 PROPERTIES INTERFACE_LINK_LIBRARIES CUDA::cudart)
  endif()
endif()
