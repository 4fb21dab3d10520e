// What kernels/cuda/adaptive_bag_launch.h needs of CUDA's header of this name, for machines without the toolkit.
#pragma once

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
