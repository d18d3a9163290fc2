// Colours that are told apart with any eyes: cividis for sizes, blue – grey – orange around a value that is right.

import { isNumber, NOT_FINITE, ZERO } from "./levels.ts";

type Colour = [r: number, g: number, b: number];

const CIVIDIS: Colour[] = [
  [0, 34, 78], [22, 52, 110], [62, 73, 108], [91, 94, 111], [117, 116, 120], [144, 138, 121], [174, 162, 113],
  [206, 188, 98], [240, 216, 72], [254, 232, 56],
];
const AROUND: Colour[] = [
  [33, 75, 168], [74, 124, 204], [134, 170, 219], [190, 201, 212], [206, 203, 196], [224, 196, 158], [226, 160, 88],
  [207, 117, 38], [163, 77, 8],
];
export const MAGENTA: Colour = [255, 0, 200];
const BLACK: Colour = [0, 0, 0];

export type Scale = { low: number; high: number; map: "size" | "around"; isFactor?: boolean };

export function mixed(map: Scale["map"], share: number): Colour {
  const stops = map === "size" ? CIVIDIS : AROUND;
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const i = Math.min(Math.floor(at), stops.length - 2);
  const part = at - i;
  return stops[i]!.map((v, k) => Math.round(v + part * (stops[i + 1]![k]! - v))) as Colour;
}

export function css([r, g, b]: Colour): string {
  return `rgb(${r} ${g} ${b})`;
}

const packed = ([r, g, b]: Colour): number => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

/** From a level to the four bytes of a pixel; none at all for what was not sampled. */
export function painter(scale: Scale): (code: number) => number {
  const table = Array.from({ length: 256 }, (_, i) => packed(mixed(scale.map, i / 255)));
  const [magenta, black] = [packed(MAGENTA), packed(BLACK)];
  const size = 255 / Math.max(1, scale.high - scale.low);
  return (code) => {
    if (isNumber(code)) return table[Math.max(0, Math.min(255, Math.round((code - scale.low) * size)))]!;
    return code === NOT_FINITE ? magenta : code === ZERO ? black : 0;
  };
}
