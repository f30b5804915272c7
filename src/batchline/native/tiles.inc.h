// AMX: eight tile registers of up to 16 rows of 64 bytes, and their products.
//
// A product adds to a tile of float sums (rows, 16) the product of a tile of x (rows, 16 pairs) and a tile of weights
// (16 pairs, 16 columns, pair). Panels lie in memory in that order, so tiles are loaded from them as they are. Registers
// with fewer rows or bytes are a matter of the configuration: nothing beyond them is read.

constexpr int64_t kTileRowCount = 16;
constexpr int64_t kTilePairs = 16;
constexpr int64_t kTileBytes = 64;  // in a row

// The registers' shapes, in the layout that the processor defines.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int number, int64_t num_rows, int64_t bytes = kTileBytes) {
    rows[number] = static_cast<uint8_t>(num_rows);
    row_bytes[number] = static_cast<uint16_t>(bytes);
  }
};

// GCC does not know that loading a tile or its shapes reads memory. This keeps earlier stores before it.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// The registers have shapes while this exists. Afterwards they are empty again, because full ones slow down a change of
// threads, and other libraries set them as they need them.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { reshape(shapes); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }

  void reshape(const TileShapes& shapes) {
    finish_stores();
    _tile_loadconfig(&shapes);
  }
};
