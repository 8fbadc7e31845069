// Work items dealt out to the CTAs of a persistent kernel.
#pragma once

#include <cstdint>

#include "common/deal.h"
#include "common/tile.cuh"

namespace cake {

// The items of all tiles, `per_tile` of each, dealt out to the CTAs in turn: the items of a tile
// run at the same time and share its data in L2.
struct DealtItems {
  const Tile* tiles;
  int32_t num_tiles;
  int32_t per_tile;

  __device__ __forceinline__ int32_t item(int32_t i) const {
    return dealt_item(i, static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x));
  }
};

// The same, but items of the last round, if they are few enough, are dealt in halves: a CTA has the
// first or second half of one, its last.
struct HalvedItems : DealtItems {
  int32_t last_round;  // whose items are halved; -1: none

  __device__ __forceinline__ explicit HalvedItems(const DealtItems& items)
      : DealtItems(items),
        last_round(halved_round(num_tiles * per_tile, static_cast<int32_t>(gridDim.x))) {}

  __device__ __forceinline__ bool is_half(int32_t i) const { return i == last_round; }
  __device__ __forceinline__ int32_t half(int32_t i) const {
    return is_half(i) ? static_cast<int32_t>(blockIdx.x) % 2 : 0;
  }
  __device__ __forceinline__ int32_t item(int32_t i) const {
    return is_half(i)
               ? halved_item(i, static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x))
               : DealtItems::item(i);
  }
};

// The tile of this CTA's i-th item; beyond the last item its count is 0.
template <class Items>
__device__ __forceinline__ Tile tile_of(const Items& items, int32_t i) {
  return items.item(i) < items.num_tiles * items.per_tile
             ? load_tile(items.tiles + items.item(i) / items.per_tile)
             : Tile{};
}

// Walks the items of this CTA, with each tile looked up one item ahead.
template <class Items = DealtItems>
class TileCursor {
 public:
  __device__ __forceinline__ explicit TileCursor(const Items& items)
      : items_(items), tile_(tile_of(items, 0)), next_(tile_of(items, 1)) {}

  __device__ __forceinline__ const Tile& tile() const { return tile_; }
  __device__ __forceinline__ const Tile& next() const { return next_; }
  __device__ __forceinline__ int32_t index() const { return index_; }
  // Which of its tile's items this is, 0 .. per_tile - 1.
  __device__ __forceinline__ int32_t part() const { return items_.item(index_) % items_.per_tile; }
  __device__ __forceinline__ bool is_half() const { return items_.is_half(index_); }
  __device__ __forceinline__ int32_t half() const { return items_.half(index_); }

  __device__ __forceinline__ void advance() {
    ++index_;
    tile_ = next_;
    next_ = tile_of(items_, index_ + 1);
  }

 private:
  const Items items_;
  int32_t index_ = 0;
  Tile tile_;
  Tile next_;
};

}  // namespace cake
