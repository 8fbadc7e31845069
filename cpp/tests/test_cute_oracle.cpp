// Every descriptor and layout of common/tcgen05_layout.h against CuTe's algebra, on the host. CuTe
// comes from the headers of CUTLASS, which nothing else uses.
#include <cutlass/numeric_types.h>
#include <gtest/gtest.h>

#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/tensor.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>

#include "common/layout.h"
#include "common/tcgen05_layout.h"

namespace cake::tcgen05 {
namespace {

using cute::_1;
using cute::_128;
using cute::_256;
using cute::_512;
using cute::Int;
using cute::Shape;
using Code = cutlass::float_e2m1_t;
using Scale = cutlass::float_ue4m3_t;
using Config = cutlass::detail::Sm1xxBlockScaledConfig<16>;
constexpr auto kMajor = cute::UMMA::Major::K;

template <int N>
using Mma = decltype(cute::make_tiled_mma(
    cute::SM100_MMA_MXF4_SS<Code, Code, float, Scale, 128, N, 16, kMajor, kMajor>{}));

alignas(1024) unsigned char memory[1 << 17];

// CuTe has no shared memory on the host, says so on stdout, and takes address 0.
template <class Function>
auto quietly(const Function& function) {
  testing::internal::CaptureStdout();
  const auto result = function();
  testing::internal::GetCapturedStdout();
  return result;
}

TEST(CuteOracle, OperandOffset) {
  const auto layout = cute::as_position_independent_swizzle_layout(
      cute::tile_to_shape(cute::UMMA::Layout_K_SW128_Atom<Code>{}, Shape<_128, _512>{}));
  for (int row = 0; row < 128; ++row) {
    for (int k = 0; k < 512; ++k) {
      const uint32_t code = layout(row, k);
      const uint32_t block = k / kLineK * (128 * kLineBytes);
      ASSERT_EQ(code / 2, block + operand_offset(row, k % kLineK)) << row << " " << k;
      ASSERT_EQ(code % 2, k % 2);
    }
  }
}

template <int N>
void check_operand_descriptors() {
  const auto shape = cute::partition_shape_B(Mma<N>{}, Shape<Int<N>, _256>{});
  const auto layout = cute::UMMA::tile_to_mma_shape(cute::UMMA::Layout_K_SW128_Atom<Code>{}, shape);
  const auto tensor =
      cute::make_tensor(cute::make_smem_ptr(cute::recast_ptr<Code>(memory)), layout);
  const auto steps =
      quietly([&] { return cute::make_tensor<cute::UMMA::smem_desc<kMajor>>(tensor); });
  constexpr uint64_t kStride = uint64_t{0x3FFF} << 32;
  const uint64_t ours = operand_descriptor(0);
  const uint64_t theirs = *steps.data();
  // With one group of 8 rows there is no stride between groups.
  EXPECT_EQ(theirs, N == 8 ? ours & ~kStride : ours);
  for (int step = 0; step < kLineK / kMmaK; ++step) {
    EXPECT_EQ(theirs + steps.layout()(0, 0, step), advance(theirs, step * kMmaK / 2));
  }
}

TEST(CuteOracle, OperandDescriptors) {
  check_operand_descriptors<8>();
  check_operand_descriptors<128>();
}

TEST(CuteOracle, InstructionDescriptor) {
  auto descriptor =
      cute::UMMA::make_instr_desc_block_scaled<Code, Code, float, Scale, 128, 8, kMajor, kMajor>();
  for (uint32_t n = 8; n <= kMaxN; n += 8) {
    descriptor.n_dim_ = n / 8;
    EXPECT_EQ(static_cast<uint32_t>(descriptor), instruction_descriptor(n));
  }
}

TEST(CuteOracle, ScaleDescriptor) {
  const auto blocks = Config::deduce_smem_layoutSFA(Mma<128>{}, Shape<_128, _128, _256>{});
  const auto source = cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<Scale*>(memory)),
                                        cute::filter_zeros(blocks));
  const auto to = cute::UMMA::tmem_sf_frg<Scale, 16, 1, true>::make(cute::shape(blocks));
  const auto compact = cute::make_tensor(to.data(), cute::filter_zeros(to.layout()));
  using Copy = cute::SM100::TMEM::UTCCP::SM100_UTCCP_4x32dp128bit_1cta;
  const auto thread = cute::make_utccp_copy(Copy{}, compact).get_slice(0);
  const auto descriptors =
      quietly([&] { return cute::get_utccp_smem_desc_tensor<Copy>(thread.partition_S(source)); });
  EXPECT_EQ(static_cast<uint64_t>(*descriptors.data()), scale_descriptor(0));
  for (int step = 0; step < kLineK / kMmaK; ++step) {
    EXPECT_EQ(scale_descriptor(0) + descriptors.layout()(0, 0, 0, step),
              advance(scale_descriptor(0), step * kScaleBlock));
  }
}

TEST(CuteOracle, ScaleBlocksInMemory) {
  for (const auto& [rows, columns] : {std::pair{768, 3584}, std::pair{3584, 384}}) {
    const auto layout = Config::tile_atom_to_shape_SFA(cute::make_shape(rows, 128, columns, 1));
    for (int row = 0; row < rows; ++row) {
      for (int c = 0; c < columns / 16; ++c) {
        ASSERT_EQ(layout(row, 16 * c, 0), scale_offset(row, c, columns / 16)) << row << " " << c;
      }
    }
  }
}

// Bytes of tensor memory: four to a column, 65536 columns to a lane.
template <int N, class Fragment>
void check_scale_columns(const Fragment& fragment) {
  for (int row = 0; row < N; ++row) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int k = 0; k < kLineK; k += 16) {
        const auto coordinate = cute::make_coord(
            cute::make_coord(cute::make_coord(cute::make_coord(row % 32, row / 32), quarter),
                             cute::make_coord(0, k % kMmaK / 16)),
            0, cute::make_coord(0, k / kMmaK));
        const uint32_t byte = fragment.layout()(coordinate);
        const uint32_t column = k / kMmaK * scale_columns(N) + row / 32;
        ASSERT_EQ(byte / 4, tensor_address(quarter * 32 + row % 32, column));
        ASSERT_EQ(byte % 4, k % kMmaK / 16);
      }
    }
  }
}

TEST(CuteOracle, ScaleColumns) {
  const auto a = Config::deduce_smem_layoutSFA(Mma<128>{}, Shape<_128, _128, _256>{});
  check_scale_columns<128>(cute::UMMA::tmem_sf_frg<Scale, 16, 1, true>::make(cute::shape(a)));
  const auto b = Config::deduce_smem_layoutSFB(Mma<128>{}, Shape<_128, _128, _256>{});
  check_scale_columns<128>(cute::UMMA::tmem_sf_frg<Scale, 16, 1, false>::make(cute::shape(b)));
}

TEST(CuteOracle, Accumulator) {
  const auto fragment = cute::UMMA::tmem_frg_1sm<float>::make(Shape<Shape<_128, _128>, _1, _1>{});
  for (int row = 0; row < kMmaRows; ++row) {
    for (int n = 0; n < 128; ++n) {
      ASSERT_EQ(fragment.layout()(cute::make_coord(row, n), 0, 0), tensor_address(row, n));
    }
  }
}

// The destination of a load: thread, bit -> bit of 16 lanes of `kRepeat` x 256 bits.
template <class Load, int kRepeat>
void check_load() {
  typename cute::Copy_Traits<Load>::DstLayout layout;
  for (int lane = 0; lane < 32; ++lane) {
    for (int word = 0; word < 4 * kRepeat; ++word) {
      const int bit = layout(lane, 32 * word);
      const Position at = position_16x256b(lane, word);
      ASSERT_EQ(bit / (256 * kRepeat), at.lane) << lane << " " << word;
      ASSERT_EQ(bit % (256 * kRepeat) / 32, at.column) << lane << " " << word;
    }
  }
}

TEST(CuteOracle, Loads) {
  check_load<cute::SM100_TMEM_LOAD_16dp256b1x, 1>();
  check_load<cute::SM100_TMEM_LOAD_16dp256b2x, 2>();
  check_load<cute::SM100_TMEM_LOAD_16dp256b4x, 4>();
  check_load<cute::SM100_TMEM_LOAD_16dp256b8x, 8>();
}

}  // namespace
}  // namespace cake::tcgen05
