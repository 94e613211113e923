// Made of gather_kernel.cu by compile_gather.py: edit that, and run this. SHA-256 of what it was made of:
// 20db7ae548d9961bef86b3c19038036c4120ad5a8b4fa0a92cdc47ad409508b7
#include "device/gather_kernel.h"

namespace gdsdata {

// clang-format off
const char* const kGatherPtx = R"ptx(
.version 7.0
.target sm_75
.address_size 64

	// .globl	gdsdata_gather

.visible .entry gdsdata_gather(
	.param .u64 gdsdata_gather_param_0,
	.param .u64 gdsdata_gather_param_1,
	.param .u64 gdsdata_gather_param_2,
	.param .u64 gdsdata_gather_param_3,
	.param .u32 gdsdata_gather_param_4
)
{
	.reg .pred 	%p<615>;
	.reg .b32 	%r<16>;
	.reg .b64 	%rd<554>;


	ld.param.u64 	%rd108, [gdsdata_gather_param_0];
	ld.param.u64 	%rd109, [gdsdata_gather_param_1];
	ld.param.u64 	%rd111, [gdsdata_gather_param_2];
	ld.param.u64 	%rd110, [gdsdata_gather_param_3];
	ld.param.u32 	%r3, [gdsdata_gather_param_4];
	mov.u32 	%r4, %ntid.x;
	shr.u32 	%r5, %r4, 5;
	cvt.u64.u32 	%rd1, %r5;
	mov.u32 	%r6, %ctaid.x;
	mul.wide.u32 	%rd112, %r5, %r6;
	mov.u32 	%r1, %tid.x;
	shr.u32 	%r7, %r1, 5;
	cvt.u64.u32 	%rd113, %r7;
	add.s64 	%rd535, %rd112, %rd113;
	setp.eq.s32 	%p1, %r3, 16;
	selp.b64 	%rd114, 0, 16, %p1;
	add.s64 	%rd115, %rd110, %rd114;
	add.s64 	%rd116, %rd115, 4095;
	shr.u64 	%rd3, %rd116, 12;
	mul.lo.s64 	%rd4, %rd3, %rd111;
	setp.ge.u64 	%p2, %rd535, %rd4;
	@%p2 bra 	$L__BB0_440;

	shl.b32 	%r8, %r1, 4;
	and.b32  	%r9, %r8, 496;
	cvt.u64.u32 	%rd5, %r9;
	and.b32  	%r2, %r3, 1;
	mov.u32 	%r10, %nctaid.x;
	cvt.u64.u32 	%rd118, %r10;
	mul.lo.s64 	%rd6, %rd1, %rd118;
	cvta.to.global.u64 	%rd7, %rd109;
	cvta.to.global.u64 	%rd8, %rd108;

$L__BB0_2:
	or.b64  	%rd119, %rd535, %rd3;
	and.b64  	%rd120, %rd119, -4294967296;
	setp.eq.s64 	%p3, %rd120, 0;
	@%p3 bra 	$L__BB0_4;

	div.u64 	%rd536, %rd535, %rd3;
	mul.lo.s64 	%rd121, %rd536, %rd3;
	sub.s64 	%rd537, %rd535, %rd121;
	bra.uni 	$L__BB0_5;

$L__BB0_4:
	cvt.u32.u64 	%r11, %rd3;
	cvt.u32.u64 	%r12, %rd535;
	div.u32 	%r13, %r12, %r11;
	mul.lo.s32 	%r14, %r13, %r11;
	sub.s32 	%r15, %r12, %r14;
	cvt.u64.u32 	%rd536, %r13;
	cvt.u64.u32 	%rd537, %r15;

$L__BB0_5:
	shl.b64 	%rd122, %rd536, 3;
	add.s64 	%rd123, %rd7, %rd122;
	ld.global.u64 	%rd32, [%rd123];
	add.s64 	%rd33, %rd32, %rd110;
	and.b64  	%rd124, %rd32, -16;
	add.s64 	%rd125, %rd124, %rd5;
	shl.b64 	%rd126, %rd537, 12;
	add.s64 	%rd34, %rd125, %rd126;
	setp.ge.u64 	%p4, %rd34, %rd33;
	@%p4 bra 	$L__BB0_7;

	ld.v2.u64 	{%rd539, %rd538}, [%rd34];

$L__BB0_7:
	add.s64 	%rd39, %rd34, 512;
	setp.ge.u64 	%p5, %rd39, %rd33;
	@%p5 bra 	$L__BB0_9;

	ld.v2.u64 	{%rd541, %rd540}, [%rd39];

$L__BB0_9:
	add.s64 	%rd44, %rd34, 1024;
	setp.ge.u64 	%p6, %rd44, %rd33;
	@%p6 bra 	$L__BB0_11;

	ld.v2.u64 	{%rd543, %rd542}, [%rd44];

$L__BB0_11:
	add.s64 	%rd49, %rd34, 1536;
	setp.ge.u64 	%p7, %rd49, %rd33;
	@%p7 bra 	$L__BB0_13;

	ld.v2.u64 	{%rd545, %rd544}, [%rd49];

$L__BB0_13:
	add.s64 	%rd54, %rd34, 2048;
	setp.ge.u64 	%p8, %rd54, %rd33;
	@%p8 bra 	$L__BB0_15;

	ld.v2.u64 	{%rd547, %rd546}, [%rd54];

$L__BB0_15:
	add.s64 	%rd59, %rd34, 2560;
	setp.ge.u64 	%p9, %rd59, %rd33;
	@%p9 bra 	$L__BB0_17;

	ld.v2.u64 	{%rd549, %rd548}, [%rd59];

$L__BB0_17:
	add.s64 	%rd64, %rd34, 3072;
	setp.ge.u64 	%p10, %rd64, %rd33;
	@%p10 bra 	$L__BB0_19;

	ld.v2.u64 	{%rd551, %rd550}, [%rd64];

$L__BB0_19:
	add.s64 	%rd69, %rd34, 3584;
	setp.ge.u64 	%p11, %rd69, %rd33;
	@%p11 bra 	$L__BB0_21;

	ld.v2.u64 	{%rd553, %rd552}, [%rd69];

$L__BB0_21:
	mul.lo.s64 	%rd143, %rd536, %rd110;
	sub.s64 	%rd144, %rd143, %rd32;
	add.s64 	%rd145, %rd144, %rd34;
	add.s64 	%rd74, %rd8, %rd145;
	@%p1 bra 	$L__BB0_423;
	bra.uni 	$L__BB0_22;

$L__BB0_423:
	@%p4 bra 	$L__BB0_425;

	st.global.v2.u64 	[%rd74], {%rd539, %rd538};

$L__BB0_425:
	@%p5 bra 	$L__BB0_427;

	st.global.v2.u64 	[%rd74+512], {%rd541, %rd540};

$L__BB0_427:
	@%p6 bra 	$L__BB0_429;

	st.global.v2.u64 	[%rd74+1024], {%rd543, %rd542};

$L__BB0_429:
	@%p7 bra 	$L__BB0_431;

	st.global.v2.u64 	[%rd74+1536], {%rd545, %rd544};

$L__BB0_431:
	@%p8 bra 	$L__BB0_433;

	st.global.v2.u64 	[%rd74+2048], {%rd547, %rd546};

$L__BB0_433:
	@%p9 bra 	$L__BB0_435;

	st.global.v2.u64 	[%rd74+2560], {%rd549, %rd548};

$L__BB0_435:
	@%p10 bra 	$L__BB0_437;

	st.global.v2.u64 	[%rd74+3072], {%rd551, %rd550};

$L__BB0_437:
	@%p11 bra 	$L__BB0_439;

	st.global.v2.u64 	[%rd74+3584], {%rd553, %rd552};
	bra.uni 	$L__BB0_439;

$L__BB0_22:
	setp.eq.s32 	%p13, %r2, 0;
	@%p13 bra 	$L__BB0_287;
	bra.uni 	$L__BB0_23;

$L__BB0_287:
	@%p4 bra 	$L__BB0_304;

	add.s64 	%rd386, %rd34, 16;
	min.u64 	%rd92, %rd386, %rd33;
	setp.ge.u64 	%p407, %rd34, %rd92;
	setp.lt.u64 	%p408, %rd34, %rd32;
	or.pred  	%p409, %p407, %p408;
	@%p409 bra 	$L__BB0_290;

	st.global.u16 	[%rd74], %rd539;

$L__BB0_290:
	max.u64 	%rd505, %rd34, %rd32;
	add.s64 	%rd387, %rd34, 2;
	setp.lt.u64 	%p410, %rd387, %rd505;
	setp.ge.u64 	%p411, %rd387, %rd92;
	or.pred  	%p412, %p411, %p410;
	@%p412 bra 	$L__BB0_292;

	shr.u64 	%rd388, %rd539, 16;
	st.global.u16 	[%rd74+2], %rd388;

$L__BB0_292:
	max.u64 	%rd506, %rd34, %rd32;
	add.s64 	%rd389, %rd34, 4;
	setp.lt.u64 	%p413, %rd389, %rd506;
	setp.ge.u64 	%p414, %rd389, %rd92;
	or.pred  	%p415, %p414, %p413;
	@%p415 bra 	$L__BB0_294;

	shr.u64 	%rd390, %rd539, 32;
	st.global.u16 	[%rd74+4], %rd390;

$L__BB0_294:
	max.u64 	%rd507, %rd34, %rd32;
	add.s64 	%rd391, %rd34, 6;
	setp.lt.u64 	%p416, %rd391, %rd507;
	setp.ge.u64 	%p417, %rd391, %rd92;
	or.pred  	%p418, %p417, %p416;
	@%p418 bra 	$L__BB0_296;

	shr.u64 	%rd392, %rd539, 48;
	st.global.u16 	[%rd74+6], %rd392;

$L__BB0_296:
	max.u64 	%rd508, %rd34, %rd32;
	add.s64 	%rd393, %rd34, 8;
	setp.lt.u64 	%p419, %rd393, %rd508;
	setp.ge.u64 	%p420, %rd393, %rd92;
	or.pred  	%p421, %p420, %p419;
	@%p421 bra 	$L__BB0_298;

	st.global.u16 	[%rd74+8], %rd538;

$L__BB0_298:
	max.u64 	%rd509, %rd34, %rd32;
	add.s64 	%rd394, %rd34, 10;
	setp.lt.u64 	%p422, %rd394, %rd509;
	setp.ge.u64 	%p423, %rd394, %rd92;
	or.pred  	%p424, %p423, %p422;
	@%p424 bra 	$L__BB0_300;

	shr.u64 	%rd395, %rd538, 16;
	st.global.u16 	[%rd74+10], %rd395;

$L__BB0_300:
	max.u64 	%rd510, %rd34, %rd32;
	add.s64 	%rd396, %rd34, 12;
	setp.lt.u64 	%p425, %rd396, %rd510;
	setp.ge.u64 	%p426, %rd396, %rd92;
	or.pred  	%p427, %p426, %p425;
	@%p427 bra 	$L__BB0_302;

	shr.u64 	%rd397, %rd538, 32;
	st.global.u16 	[%rd74+12], %rd397;

$L__BB0_302:
	max.u64 	%rd511, %rd34, %rd32;
	add.s64 	%rd398, %rd34, 14;
	setp.lt.u64 	%p428, %rd398, %rd511;
	setp.ge.u64 	%p429, %rd398, %rd92;
	or.pred  	%p430, %p429, %p428;
	@%p430 bra 	$L__BB0_304;

	shr.u64 	%rd399, %rd538, 48;
	st.global.u16 	[%rd74+14], %rd399;

$L__BB0_304:
	@%p5 bra 	$L__BB0_321;

	add.s64 	%rd518, %rd34, 512;
	max.u64 	%rd93, %rd518, %rd32;
	add.s64 	%rd400, %rd34, 528;
	min.u64 	%rd94, %rd400, %rd33;
	setp.ge.u64 	%p432, %rd518, %rd94;
	setp.lt.u64 	%p433, %rd518, %rd32;
	or.pred  	%p434, %p432, %p433;
	@%p434 bra 	$L__BB0_307;

	st.global.u16 	[%rd74+512], %rd541;

$L__BB0_307:
	add.s64 	%rd401, %rd34, 514;
	setp.lt.u64 	%p435, %rd401, %rd93;
	setp.ge.u64 	%p436, %rd401, %rd94;
	or.pred  	%p437, %p436, %p435;
	@%p437 bra 	$L__BB0_309;

	shr.u64 	%rd402, %rd541, 16;
	st.global.u16 	[%rd74+514], %rd402;

$L__BB0_309:
	add.s64 	%rd403, %rd34, 516;
	setp.lt.u64 	%p438, %rd403, %rd93;
	setp.ge.u64 	%p439, %rd403, %rd94;
	or.pred  	%p440, %p439, %p438;
	@%p440 bra 	$L__BB0_311;

	shr.u64 	%rd404, %rd541, 32;
	st.global.u16 	[%rd74+516], %rd404;

$L__BB0_311:
	add.s64 	%rd405, %rd34, 518;
	setp.lt.u64 	%p441, %rd405, %rd93;
	setp.ge.u64 	%p442, %rd405, %rd94;
	or.pred  	%p443, %p442, %p441;
	@%p443 bra 	$L__BB0_313;

	shr.u64 	%rd406, %rd541, 48;
	st.global.u16 	[%rd74+518], %rd406;

$L__BB0_313:
	add.s64 	%rd407, %rd34, 520;
	setp.lt.u64 	%p444, %rd407, %rd93;
	setp.ge.u64 	%p445, %rd407, %rd94;
	or.pred  	%p446, %p445, %p444;
	@%p446 bra 	$L__BB0_315;

	st.global.u16 	[%rd74+520], %rd540;

$L__BB0_315:
	add.s64 	%rd408, %rd34, 522;
	setp.lt.u64 	%p447, %rd408, %rd93;
	setp.ge.u64 	%p448, %rd408, %rd94;
	or.pred  	%p449, %p448, %p447;
	@%p449 bra 	$L__BB0_317;

	shr.u64 	%rd409, %rd540, 16;
	st.global.u16 	[%rd74+522], %rd409;

$L__BB0_317:
	add.s64 	%rd410, %rd34, 524;
	setp.lt.u64 	%p450, %rd410, %rd93;
	setp.ge.u64 	%p451, %rd410, %rd94;
	or.pred  	%p452, %p451, %p450;
	@%p452 bra 	$L__BB0_319;

	shr.u64 	%rd411, %rd540, 32;
	st.global.u16 	[%rd74+524], %rd411;

$L__BB0_319:
	add.s64 	%rd412, %rd34, 526;
	setp.lt.u64 	%p453, %rd412, %rd93;
	setp.ge.u64 	%p454, %rd412, %rd94;
	or.pred  	%p455, %p454, %p453;
	@%p455 bra 	$L__BB0_321;

	shr.u64 	%rd413, %rd540, 48;
	st.global.u16 	[%rd74+526], %rd413;

$L__BB0_321:
	@%p6 bra 	$L__BB0_338;

	add.s64 	%rd517, %rd34, 1024;
	max.u64 	%rd95, %rd517, %rd32;
	add.s64 	%rd414, %rd34, 1040;
	min.u64 	%rd96, %rd414, %rd33;
	setp.ge.u64 	%p457, %rd517, %rd96;
	setp.lt.u64 	%p458, %rd517, %rd32;
	or.pred  	%p459, %p457, %p458;
	@%p459 bra 	$L__BB0_324;

	st.global.u16 	[%rd74+1024], %rd543;

$L__BB0_324:
	add.s64 	%rd415, %rd34, 1026;
	setp.lt.u64 	%p460, %rd415, %rd95;
	setp.ge.u64 	%p461, %rd415, %rd96;
	or.pred  	%p462, %p461, %p460;
	@%p462 bra 	$L__BB0_326;

	shr.u64 	%rd416, %rd543, 16;
	st.global.u16 	[%rd74+1026], %rd416;

$L__BB0_326:
	add.s64 	%rd417, %rd34, 1028;
	setp.lt.u64 	%p463, %rd417, %rd95;
	setp.ge.u64 	%p464, %rd417, %rd96;
	or.pred  	%p465, %p464, %p463;
	@%p465 bra 	$L__BB0_328;

	shr.u64 	%rd418, %rd543, 32;
	st.global.u16 	[%rd74+1028], %rd418;

$L__BB0_328:
	add.s64 	%rd419, %rd34, 1030;
	setp.lt.u64 	%p466, %rd419, %rd95;
	setp.ge.u64 	%p467, %rd419, %rd96;
	or.pred  	%p468, %p467, %p466;
	@%p468 bra 	$L__BB0_330;

	shr.u64 	%rd420, %rd543, 48;
	st.global.u16 	[%rd74+1030], %rd420;

$L__BB0_330:
	add.s64 	%rd421, %rd34, 1032;
	setp.lt.u64 	%p469, %rd421, %rd95;
	setp.ge.u64 	%p470, %rd421, %rd96;
	or.pred  	%p471, %p470, %p469;
	@%p471 bra 	$L__BB0_332;

	st.global.u16 	[%rd74+1032], %rd542;

$L__BB0_332:
	add.s64 	%rd422, %rd34, 1034;
	setp.lt.u64 	%p472, %rd422, %rd95;
	setp.ge.u64 	%p473, %rd422, %rd96;
	or.pred  	%p474, %p473, %p472;
	@%p474 bra 	$L__BB0_334;

	shr.u64 	%rd423, %rd542, 16;
	st.global.u16 	[%rd74+1034], %rd423;

$L__BB0_334:
	add.s64 	%rd424, %rd34, 1036;
	setp.lt.u64 	%p475, %rd424, %rd95;
	setp.ge.u64 	%p476, %rd424, %rd96;
	or.pred  	%p477, %p476, %p475;
	@%p477 bra 	$L__BB0_336;

	shr.u64 	%rd425, %rd542, 32;
	st.global.u16 	[%rd74+1036], %rd425;

$L__BB0_336:
	add.s64 	%rd426, %rd34, 1038;
	setp.lt.u64 	%p478, %rd426, %rd95;
	setp.ge.u64 	%p479, %rd426, %rd96;
	or.pred  	%p480, %p479, %p478;
	@%p480 bra 	$L__BB0_338;

	shr.u64 	%rd427, %rd542, 48;
	st.global.u16 	[%rd74+1038], %rd427;

$L__BB0_338:
	@%p7 bra 	$L__BB0_355;

	add.s64 	%rd516, %rd34, 1536;
	max.u64 	%rd97, %rd516, %rd32;
	add.s64 	%rd428, %rd34, 1552;
	min.u64 	%rd98, %rd428, %rd33;
	setp.ge.u64 	%p482, %rd516, %rd98;
	setp.lt.u64 	%p483, %rd516, %rd32;
	or.pred  	%p484, %p482, %p483;
	@%p484 bra 	$L__BB0_341;

	st.global.u16 	[%rd74+1536], %rd545;

$L__BB0_341:
	add.s64 	%rd429, %rd34, 1538;
	setp.lt.u64 	%p485, %rd429, %rd97;
	setp.ge.u64 	%p486, %rd429, %rd98;
	or.pred  	%p487, %p486, %p485;
	@%p487 bra 	$L__BB0_343;

	shr.u64 	%rd430, %rd545, 16;
	st.global.u16 	[%rd74+1538], %rd430;

$L__BB0_343:
	add.s64 	%rd431, %rd34, 1540;
	setp.lt.u64 	%p488, %rd431, %rd97;
	setp.ge.u64 	%p489, %rd431, %rd98;
	or.pred  	%p490, %p489, %p488;
	@%p490 bra 	$L__BB0_345;

	shr.u64 	%rd432, %rd545, 32;
	st.global.u16 	[%rd74+1540], %rd432;

$L__BB0_345:
	add.s64 	%rd433, %rd34, 1542;
	setp.lt.u64 	%p491, %rd433, %rd97;
	setp.ge.u64 	%p492, %rd433, %rd98;
	or.pred  	%p493, %p492, %p491;
	@%p493 bra 	$L__BB0_347;

	shr.u64 	%rd434, %rd545, 48;
	st.global.u16 	[%rd74+1542], %rd434;

$L__BB0_347:
	add.s64 	%rd435, %rd34, 1544;
	setp.lt.u64 	%p494, %rd435, %rd97;
	setp.ge.u64 	%p495, %rd435, %rd98;
	or.pred  	%p496, %p495, %p494;
	@%p496 bra 	$L__BB0_349;

	st.global.u16 	[%rd74+1544], %rd544;

$L__BB0_349:
	add.s64 	%rd436, %rd34, 1546;
	setp.lt.u64 	%p497, %rd436, %rd97;
	setp.ge.u64 	%p498, %rd436, %rd98;
	or.pred  	%p499, %p498, %p497;
	@%p499 bra 	$L__BB0_351;

	shr.u64 	%rd437, %rd544, 16;
	st.global.u16 	[%rd74+1546], %rd437;

$L__BB0_351:
	add.s64 	%rd438, %rd34, 1548;
	setp.lt.u64 	%p500, %rd438, %rd97;
	setp.ge.u64 	%p501, %rd438, %rd98;
	or.pred  	%p502, %p501, %p500;
	@%p502 bra 	$L__BB0_353;

	shr.u64 	%rd439, %rd544, 32;
	st.global.u16 	[%rd74+1548], %rd439;

$L__BB0_353:
	add.s64 	%rd440, %rd34, 1550;
	setp.lt.u64 	%p503, %rd440, %rd97;
	setp.ge.u64 	%p504, %rd440, %rd98;
	or.pred  	%p505, %p504, %p503;
	@%p505 bra 	$L__BB0_355;

	shr.u64 	%rd441, %rd544, 48;
	st.global.u16 	[%rd74+1550], %rd441;

$L__BB0_355:
	@%p8 bra 	$L__BB0_372;

	add.s64 	%rd515, %rd34, 2048;
	max.u64 	%rd99, %rd515, %rd32;
	add.s64 	%rd442, %rd34, 2064;
	min.u64 	%rd100, %rd442, %rd33;
	setp.ge.u64 	%p507, %rd515, %rd100;
	setp.lt.u64 	%p508, %rd515, %rd32;
	or.pred  	%p509, %p507, %p508;
	@%p509 bra 	$L__BB0_358;

	st.global.u16 	[%rd74+2048], %rd547;

$L__BB0_358:
	add.s64 	%rd443, %rd34, 2050;
	setp.lt.u64 	%p510, %rd443, %rd99;
	setp.ge.u64 	%p511, %rd443, %rd100;
	or.pred  	%p512, %p511, %p510;
	@%p512 bra 	$L__BB0_360;

	shr.u64 	%rd444, %rd547, 16;
	st.global.u16 	[%rd74+2050], %rd444;

$L__BB0_360:
	add.s64 	%rd445, %rd34, 2052;
	setp.lt.u64 	%p513, %rd445, %rd99;
	setp.ge.u64 	%p514, %rd445, %rd100;
	or.pred  	%p515, %p514, %p513;
	@%p515 bra 	$L__BB0_362;

	shr.u64 	%rd446, %rd547, 32;
	st.global.u16 	[%rd74+2052], %rd446;

$L__BB0_362:
	add.s64 	%rd447, %rd34, 2054;
	setp.lt.u64 	%p516, %rd447, %rd99;
	setp.ge.u64 	%p517, %rd447, %rd100;
	or.pred  	%p518, %p517, %p516;
	@%p518 bra 	$L__BB0_364;

	shr.u64 	%rd448, %rd547, 48;
	st.global.u16 	[%rd74+2054], %rd448;

$L__BB0_364:
	add.s64 	%rd449, %rd34, 2056;
	setp.lt.u64 	%p519, %rd449, %rd99;
	setp.ge.u64 	%p520, %rd449, %rd100;
	or.pred  	%p521, %p520, %p519;
	@%p521 bra 	$L__BB0_366;

	st.global.u16 	[%rd74+2056], %rd546;

$L__BB0_366:
	add.s64 	%rd450, %rd34, 2058;
	setp.lt.u64 	%p522, %rd450, %rd99;
	setp.ge.u64 	%p523, %rd450, %rd100;
	or.pred  	%p524, %p523, %p522;
	@%p524 bra 	$L__BB0_368;

	shr.u64 	%rd451, %rd546, 16;
	st.global.u16 	[%rd74+2058], %rd451;

$L__BB0_368:
	add.s64 	%rd452, %rd34, 2060;
	setp.lt.u64 	%p525, %rd452, %rd99;
	setp.ge.u64 	%p526, %rd452, %rd100;
	or.pred  	%p527, %p526, %p525;
	@%p527 bra 	$L__BB0_370;

	shr.u64 	%rd453, %rd546, 32;
	st.global.u16 	[%rd74+2060], %rd453;

$L__BB0_370:
	add.s64 	%rd454, %rd34, 2062;
	setp.lt.u64 	%p528, %rd454, %rd99;
	setp.ge.u64 	%p529, %rd454, %rd100;
	or.pred  	%p530, %p529, %p528;
	@%p530 bra 	$L__BB0_372;

	shr.u64 	%rd455, %rd546, 48;
	st.global.u16 	[%rd74+2062], %rd455;

$L__BB0_372:
	@%p9 bra 	$L__BB0_389;

	add.s64 	%rd514, %rd34, 2560;
	max.u64 	%rd101, %rd514, %rd32;
	add.s64 	%rd456, %rd34, 2576;
	min.u64 	%rd102, %rd456, %rd33;
	setp.ge.u64 	%p532, %rd514, %rd102;
	setp.lt.u64 	%p533, %rd514, %rd32;
	or.pred  	%p534, %p532, %p533;
	@%p534 bra 	$L__BB0_375;

	st.global.u16 	[%rd74+2560], %rd549;

$L__BB0_375:
	add.s64 	%rd457, %rd34, 2562;
	setp.lt.u64 	%p535, %rd457, %rd101;
	setp.ge.u64 	%p536, %rd457, %rd102;
	or.pred  	%p537, %p536, %p535;
	@%p537 bra 	$L__BB0_377;

	shr.u64 	%rd458, %rd549, 16;
	st.global.u16 	[%rd74+2562], %rd458;

$L__BB0_377:
	add.s64 	%rd459, %rd34, 2564;
	setp.lt.u64 	%p538, %rd459, %rd101;
	setp.ge.u64 	%p539, %rd459, %rd102;
	or.pred  	%p540, %p539, %p538;
	@%p540 bra 	$L__BB0_379;

	shr.u64 	%rd460, %rd549, 32;
	st.global.u16 	[%rd74+2564], %rd460;

$L__BB0_379:
	add.s64 	%rd461, %rd34, 2566;
	setp.lt.u64 	%p541, %rd461, %rd101;
	setp.ge.u64 	%p542, %rd461, %rd102;
	or.pred  	%p543, %p542, %p541;
	@%p543 bra 	$L__BB0_381;

	shr.u64 	%rd462, %rd549, 48;
	st.global.u16 	[%rd74+2566], %rd462;

$L__BB0_381:
	add.s64 	%rd463, %rd34, 2568;
	setp.lt.u64 	%p544, %rd463, %rd101;
	setp.ge.u64 	%p545, %rd463, %rd102;
	or.pred  	%p546, %p545, %p544;
	@%p546 bra 	$L__BB0_383;

	st.global.u16 	[%rd74+2568], %rd548;

$L__BB0_383:
	add.s64 	%rd464, %rd34, 2570;
	setp.lt.u64 	%p547, %rd464, %rd101;
	setp.ge.u64 	%p548, %rd464, %rd102;
	or.pred  	%p549, %p548, %p547;
	@%p549 bra 	$L__BB0_385;

	shr.u64 	%rd465, %rd548, 16;
	st.global.u16 	[%rd74+2570], %rd465;

$L__BB0_385:
	add.s64 	%rd466, %rd34, 2572;
	setp.lt.u64 	%p550, %rd466, %rd101;
	setp.ge.u64 	%p551, %rd466, %rd102;
	or.pred  	%p552, %p551, %p550;
	@%p552 bra 	$L__BB0_387;

	shr.u64 	%rd467, %rd548, 32;
	st.global.u16 	[%rd74+2572], %rd467;

$L__BB0_387:
	add.s64 	%rd468, %rd34, 2574;
	setp.lt.u64 	%p553, %rd468, %rd101;
	setp.ge.u64 	%p554, %rd468, %rd102;
	or.pred  	%p555, %p554, %p553;
	@%p555 bra 	$L__BB0_389;

	shr.u64 	%rd469, %rd548, 48;
	st.global.u16 	[%rd74+2574], %rd469;

$L__BB0_389:
	@%p10 bra 	$L__BB0_406;

	add.s64 	%rd513, %rd34, 3072;
	max.u64 	%rd103, %rd513, %rd32;
	add.s64 	%rd470, %rd34, 3088;
	min.u64 	%rd104, %rd470, %rd33;
	setp.ge.u64 	%p557, %rd513, %rd104;
	setp.lt.u64 	%p558, %rd513, %rd32;
	or.pred  	%p559, %p557, %p558;
	@%p559 bra 	$L__BB0_392;

	st.global.u16 	[%rd74+3072], %rd551;

$L__BB0_392:
	add.s64 	%rd471, %rd34, 3074;
	setp.lt.u64 	%p560, %rd471, %rd103;
	setp.ge.u64 	%p561, %rd471, %rd104;
	or.pred  	%p562, %p561, %p560;
	@%p562 bra 	$L__BB0_394;

	shr.u64 	%rd472, %rd551, 16;
	st.global.u16 	[%rd74+3074], %rd472;

$L__BB0_394:
	add.s64 	%rd473, %rd34, 3076;
	setp.lt.u64 	%p563, %rd473, %rd103;
	setp.ge.u64 	%p564, %rd473, %rd104;
	or.pred  	%p565, %p564, %p563;
	@%p565 bra 	$L__BB0_396;

	shr.u64 	%rd474, %rd551, 32;
	st.global.u16 	[%rd74+3076], %rd474;

$L__BB0_396:
	add.s64 	%rd475, %rd34, 3078;
	setp.lt.u64 	%p566, %rd475, %rd103;
	setp.ge.u64 	%p567, %rd475, %rd104;
	or.pred  	%p568, %p567, %p566;
	@%p568 bra 	$L__BB0_398;

	shr.u64 	%rd476, %rd551, 48;
	st.global.u16 	[%rd74+3078], %rd476;

$L__BB0_398:
	add.s64 	%rd477, %rd34, 3080;
	setp.lt.u64 	%p569, %rd477, %rd103;
	setp.ge.u64 	%p570, %rd477, %rd104;
	or.pred  	%p571, %p570, %p569;
	@%p571 bra 	$L__BB0_400;

	st.global.u16 	[%rd74+3080], %rd550;

$L__BB0_400:
	add.s64 	%rd478, %rd34, 3082;
	setp.lt.u64 	%p572, %rd478, %rd103;
	setp.ge.u64 	%p573, %rd478, %rd104;
	or.pred  	%p574, %p573, %p572;
	@%p574 bra 	$L__BB0_402;

	shr.u64 	%rd479, %rd550, 16;
	st.global.u16 	[%rd74+3082], %rd479;

$L__BB0_402:
	add.s64 	%rd480, %rd34, 3084;
	setp.lt.u64 	%p575, %rd480, %rd103;
	setp.ge.u64 	%p576, %rd480, %rd104;
	or.pred  	%p577, %p576, %p575;
	@%p577 bra 	$L__BB0_404;

	shr.u64 	%rd481, %rd550, 32;
	st.global.u16 	[%rd74+3084], %rd481;

$L__BB0_404:
	add.s64 	%rd482, %rd34, 3086;
	setp.lt.u64 	%p578, %rd482, %rd103;
	setp.ge.u64 	%p579, %rd482, %rd104;
	or.pred  	%p580, %p579, %p578;
	@%p580 bra 	$L__BB0_406;

	shr.u64 	%rd483, %rd550, 48;
	st.global.u16 	[%rd74+3086], %rd483;

$L__BB0_406:
	@%p11 bra 	$L__BB0_439;

	add.s64 	%rd512, %rd34, 3584;
	max.u64 	%rd105, %rd512, %rd32;
	add.s64 	%rd484, %rd34, 3600;
	min.u64 	%rd106, %rd484, %rd33;
	setp.ge.u64 	%p582, %rd512, %rd106;
	setp.lt.u64 	%p583, %rd512, %rd32;
	or.pred  	%p584, %p582, %p583;
	@%p584 bra 	$L__BB0_409;

	st.global.u16 	[%rd74+3584], %rd553;

$L__BB0_409:
	add.s64 	%rd485, %rd34, 3586;
	setp.lt.u64 	%p585, %rd485, %rd105;
	setp.ge.u64 	%p586, %rd485, %rd106;
	or.pred  	%p587, %p586, %p585;
	@%p587 bra 	$L__BB0_411;

	shr.u64 	%rd486, %rd553, 16;
	st.global.u16 	[%rd74+3586], %rd486;

$L__BB0_411:
	add.s64 	%rd487, %rd34, 3588;
	setp.lt.u64 	%p588, %rd487, %rd105;
	setp.ge.u64 	%p589, %rd487, %rd106;
	or.pred  	%p590, %p589, %p588;
	@%p590 bra 	$L__BB0_413;

	shr.u64 	%rd488, %rd553, 32;
	st.global.u16 	[%rd74+3588], %rd488;

$L__BB0_413:
	add.s64 	%rd489, %rd34, 3590;
	setp.lt.u64 	%p591, %rd489, %rd105;
	setp.ge.u64 	%p592, %rd489, %rd106;
	or.pred  	%p593, %p592, %p591;
	@%p593 bra 	$L__BB0_415;

	shr.u64 	%rd490, %rd553, 48;
	st.global.u16 	[%rd74+3590], %rd490;

$L__BB0_415:
	add.s64 	%rd491, %rd34, 3592;
	setp.lt.u64 	%p594, %rd491, %rd105;
	setp.ge.u64 	%p595, %rd491, %rd106;
	or.pred  	%p596, %p595, %p594;
	@%p596 bra 	$L__BB0_417;

	st.global.u16 	[%rd74+3592], %rd552;

$L__BB0_417:
	add.s64 	%rd492, %rd34, 3594;
	setp.lt.u64 	%p597, %rd492, %rd105;
	setp.ge.u64 	%p598, %rd492, %rd106;
	or.pred  	%p599, %p598, %p597;
	@%p599 bra 	$L__BB0_419;

	shr.u64 	%rd493, %rd552, 16;
	st.global.u16 	[%rd74+3594], %rd493;

$L__BB0_419:
	add.s64 	%rd494, %rd34, 3596;
	setp.lt.u64 	%p600, %rd494, %rd105;
	setp.ge.u64 	%p601, %rd494, %rd106;
	or.pred  	%p602, %p601, %p600;
	@%p602 bra 	$L__BB0_421;

	shr.u64 	%rd495, %rd552, 32;
	st.global.u16 	[%rd74+3596], %rd495;

$L__BB0_421:
	add.s64 	%rd496, %rd34, 3598;
	setp.lt.u64 	%p603, %rd496, %rd105;
	setp.ge.u64 	%p604, %rd496, %rd106;
	or.pred  	%p605, %p604, %p603;
	@%p605 bra 	$L__BB0_439;

	shr.u64 	%rd497, %rd552, 48;
	st.global.u16 	[%rd74+3598], %rd497;
	bra.uni 	$L__BB0_439;

$L__BB0_23:
	@%p4 bra 	$L__BB0_56;

	max.u64 	%rd75, %rd34, %rd32;
	add.s64 	%rd146, %rd34, 16;
	min.u64 	%rd76, %rd146, %rd33;
	setp.ge.u64 	%p15, %rd34, %rd76;
	setp.lt.u64 	%p16, %rd34, %rd32;
	or.pred  	%p17, %p15, %p16;
	@%p17 bra 	$L__BB0_26;

	st.global.u8 	[%rd74], %rd539;

$L__BB0_26:
	add.s64 	%rd147, %rd34, 1;
	setp.lt.u64 	%p18, %rd147, %rd75;
	setp.ge.u64 	%p19, %rd147, %rd76;
	or.pred  	%p20, %p19, %p18;
	@%p20 bra 	$L__BB0_28;

	shr.u64 	%rd148, %rd539, 8;
	st.global.u8 	[%rd74+1], %rd148;

$L__BB0_28:
	add.s64 	%rd149, %rd34, 2;
	setp.lt.u64 	%p21, %rd149, %rd75;
	setp.ge.u64 	%p22, %rd149, %rd76;
	or.pred  	%p23, %p22, %p21;
	@%p23 bra 	$L__BB0_30;

	shr.u64 	%rd150, %rd539, 16;
	st.global.u8 	[%rd74+2], %rd150;

$L__BB0_30:
	add.s64 	%rd151, %rd34, 3;
	setp.lt.u64 	%p24, %rd151, %rd75;
	setp.ge.u64 	%p25, %rd151, %rd76;
	or.pred  	%p26, %p25, %p24;
	@%p26 bra 	$L__BB0_32;

	shr.u64 	%rd152, %rd539, 24;
	st.global.u8 	[%rd74+3], %rd152;

$L__BB0_32:
	add.s64 	%rd153, %rd34, 4;
	setp.lt.u64 	%p27, %rd153, %rd75;
	setp.ge.u64 	%p28, %rd153, %rd76;
	or.pred  	%p29, %p28, %p27;
	@%p29 bra 	$L__BB0_34;

	shr.u64 	%rd154, %rd539, 32;
	st.global.u8 	[%rd74+4], %rd154;

$L__BB0_34:
	add.s64 	%rd155, %rd34, 5;
	setp.lt.u64 	%p30, %rd155, %rd75;
	setp.ge.u64 	%p31, %rd155, %rd76;
	or.pred  	%p32, %p31, %p30;
	@%p32 bra 	$L__BB0_36;

	shr.u64 	%rd156, %rd539, 40;
	st.global.u8 	[%rd74+5], %rd156;

$L__BB0_36:
	add.s64 	%rd157, %rd34, 6;
	setp.lt.u64 	%p33, %rd157, %rd75;
	setp.ge.u64 	%p34, %rd157, %rd76;
	or.pred  	%p35, %p34, %p33;
	@%p35 bra 	$L__BB0_38;

	shr.u64 	%rd158, %rd539, 48;
	st.global.u8 	[%rd74+6], %rd158;

$L__BB0_38:
	add.s64 	%rd159, %rd34, 7;
	setp.lt.u64 	%p36, %rd159, %rd75;
	setp.ge.u64 	%p37, %rd159, %rd76;
	or.pred  	%p38, %p37, %p36;
	@%p38 bra 	$L__BB0_40;

	shr.u64 	%rd160, %rd539, 56;
	st.global.u8 	[%rd74+7], %rd160;

$L__BB0_40:
	add.s64 	%rd161, %rd34, 8;
	setp.lt.u64 	%p39, %rd161, %rd75;
	setp.ge.u64 	%p40, %rd161, %rd76;
	or.pred  	%p41, %p40, %p39;
	@%p41 bra 	$L__BB0_42;

	st.global.u8 	[%rd74+8], %rd538;

$L__BB0_42:
	add.s64 	%rd162, %rd34, 9;
	setp.lt.u64 	%p42, %rd162, %rd75;
	setp.ge.u64 	%p43, %rd162, %rd76;
	or.pred  	%p44, %p43, %p42;
	@%p44 bra 	$L__BB0_44;

	shr.u64 	%rd163, %rd538, 8;
	st.global.u8 	[%rd74+9], %rd163;

$L__BB0_44:
	add.s64 	%rd164, %rd34, 10;
	setp.lt.u64 	%p45, %rd164, %rd75;
	setp.ge.u64 	%p46, %rd164, %rd76;
	or.pred  	%p47, %p46, %p45;
	@%p47 bra 	$L__BB0_46;

	shr.u64 	%rd165, %rd538, 16;
	st.global.u8 	[%rd74+10], %rd165;

$L__BB0_46:
	add.s64 	%rd166, %rd34, 11;
	setp.lt.u64 	%p48, %rd166, %rd75;
	setp.ge.u64 	%p49, %rd166, %rd76;
	or.pred  	%p50, %p49, %p48;
	@%p50 bra 	$L__BB0_48;

	shr.u64 	%rd167, %rd538, 24;
	st.global.u8 	[%rd74+11], %rd167;

$L__BB0_48:
	add.s64 	%rd168, %rd34, 12;
	setp.lt.u64 	%p51, %rd168, %rd75;
	setp.ge.u64 	%p52, %rd168, %rd76;
	or.pred  	%p53, %p52, %p51;
	@%p53 bra 	$L__BB0_50;

	shr.u64 	%rd169, %rd538, 32;
	st.global.u8 	[%rd74+12], %rd169;

$L__BB0_50:
	add.s64 	%rd170, %rd34, 13;
	setp.lt.u64 	%p54, %rd170, %rd75;
	setp.ge.u64 	%p55, %rd170, %rd76;
	or.pred  	%p56, %p55, %p54;
	@%p56 bra 	$L__BB0_52;

	shr.u64 	%rd171, %rd538, 40;
	st.global.u8 	[%rd74+13], %rd171;

$L__BB0_52:
	add.s64 	%rd172, %rd34, 14;
	setp.lt.u64 	%p57, %rd172, %rd75;
	setp.ge.u64 	%p58, %rd172, %rd76;
	or.pred  	%p59, %p58, %p57;
	@%p59 bra 	$L__BB0_54;

	shr.u64 	%rd173, %rd538, 48;
	st.global.u8 	[%rd74+14], %rd173;

$L__BB0_54:
	add.s64 	%rd174, %rd34, 15;
	setp.lt.u64 	%p60, %rd174, %rd75;
	setp.ge.u64 	%p61, %rd174, %rd76;
	or.pred  	%p62, %p61, %p60;
	@%p62 bra 	$L__BB0_56;

	shr.u64 	%rd175, %rd538, 56;
	st.global.u8 	[%rd74+15], %rd175;

$L__BB0_56:
	@%p5 bra 	$L__BB0_89;

	add.s64 	%rd504, %rd34, 512;
	max.u64 	%rd77, %rd504, %rd32;
	add.s64 	%rd176, %rd34, 528;
	min.u64 	%rd78, %rd176, %rd33;
	setp.ge.u64 	%p64, %rd504, %rd78;
	setp.lt.u64 	%p65, %rd504, %rd32;
	or.pred  	%p66, %p64, %p65;
	@%p66 bra 	$L__BB0_59;

	st.global.u8 	[%rd74+512], %rd541;

$L__BB0_59:
	add.s64 	%rd177, %rd34, 513;
	setp.lt.u64 	%p67, %rd177, %rd77;
	setp.ge.u64 	%p68, %rd177, %rd78;
	or.pred  	%p69, %p68, %p67;
	@%p69 bra 	$L__BB0_61;

	shr.u64 	%rd178, %rd541, 8;
	st.global.u8 	[%rd74+513], %rd178;

$L__BB0_61:
	add.s64 	%rd179, %rd34, 514;
	setp.lt.u64 	%p70, %rd179, %rd77;
	setp.ge.u64 	%p71, %rd179, %rd78;
	or.pred  	%p72, %p71, %p70;
	@%p72 bra 	$L__BB0_63;

	shr.u64 	%rd180, %rd541, 16;
	st.global.u8 	[%rd74+514], %rd180;

$L__BB0_63:
	add.s64 	%rd181, %rd34, 515;
	setp.lt.u64 	%p73, %rd181, %rd77;
	setp.ge.u64 	%p74, %rd181, %rd78;
	or.pred  	%p75, %p74, %p73;
	@%p75 bra 	$L__BB0_65;

	shr.u64 	%rd182, %rd541, 24;
	st.global.u8 	[%rd74+515], %rd182;

$L__BB0_65:
	add.s64 	%rd183, %rd34, 516;
	setp.lt.u64 	%p76, %rd183, %rd77;
	setp.ge.u64 	%p77, %rd183, %rd78;
	or.pred  	%p78, %p77, %p76;
	@%p78 bra 	$L__BB0_67;

	shr.u64 	%rd184, %rd541, 32;
	st.global.u8 	[%rd74+516], %rd184;

$L__BB0_67:
	add.s64 	%rd185, %rd34, 517;
	setp.lt.u64 	%p79, %rd185, %rd77;
	setp.ge.u64 	%p80, %rd185, %rd78;
	or.pred  	%p81, %p80, %p79;
	@%p81 bra 	$L__BB0_69;

	shr.u64 	%rd186, %rd541, 40;
	st.global.u8 	[%rd74+517], %rd186;

$L__BB0_69:
	add.s64 	%rd187, %rd34, 518;
	setp.lt.u64 	%p82, %rd187, %rd77;
	setp.ge.u64 	%p83, %rd187, %rd78;
	or.pred  	%p84, %p83, %p82;
	@%p84 bra 	$L__BB0_71;

	shr.u64 	%rd188, %rd541, 48;
	st.global.u8 	[%rd74+518], %rd188;

$L__BB0_71:
	add.s64 	%rd189, %rd34, 519;
	setp.lt.u64 	%p85, %rd189, %rd77;
	setp.ge.u64 	%p86, %rd189, %rd78;
	or.pred  	%p87, %p86, %p85;
	@%p87 bra 	$L__BB0_73;

	shr.u64 	%rd190, %rd541, 56;
	st.global.u8 	[%rd74+519], %rd190;

$L__BB0_73:
	add.s64 	%rd191, %rd34, 520;
	setp.lt.u64 	%p88, %rd191, %rd77;
	setp.ge.u64 	%p89, %rd191, %rd78;
	or.pred  	%p90, %p89, %p88;
	@%p90 bra 	$L__BB0_75;

	st.global.u8 	[%rd74+520], %rd540;

$L__BB0_75:
	add.s64 	%rd192, %rd34, 521;
	setp.lt.u64 	%p91, %rd192, %rd77;
	setp.ge.u64 	%p92, %rd192, %rd78;
	or.pred  	%p93, %p92, %p91;
	@%p93 bra 	$L__BB0_77;

	shr.u64 	%rd193, %rd540, 8;
	st.global.u8 	[%rd74+521], %rd193;

$L__BB0_77:
	add.s64 	%rd194, %rd34, 522;
	setp.lt.u64 	%p94, %rd194, %rd77;
	setp.ge.u64 	%p95, %rd194, %rd78;
	or.pred  	%p96, %p95, %p94;
	@%p96 bra 	$L__BB0_79;

	shr.u64 	%rd195, %rd540, 16;
	st.global.u8 	[%rd74+522], %rd195;

$L__BB0_79:
	add.s64 	%rd196, %rd34, 523;
	setp.lt.u64 	%p97, %rd196, %rd77;
	setp.ge.u64 	%p98, %rd196, %rd78;
	or.pred  	%p99, %p98, %p97;
	@%p99 bra 	$L__BB0_81;

	shr.u64 	%rd197, %rd540, 24;
	st.global.u8 	[%rd74+523], %rd197;

$L__BB0_81:
	add.s64 	%rd198, %rd34, 524;
	setp.lt.u64 	%p100, %rd198, %rd77;
	setp.ge.u64 	%p101, %rd198, %rd78;
	or.pred  	%p102, %p101, %p100;
	@%p102 bra 	$L__BB0_83;

	shr.u64 	%rd199, %rd540, 32;
	st.global.u8 	[%rd74+524], %rd199;

$L__BB0_83:
	add.s64 	%rd200, %rd34, 525;
	setp.lt.u64 	%p103, %rd200, %rd77;
	setp.ge.u64 	%p104, %rd200, %rd78;
	or.pred  	%p105, %p104, %p103;
	@%p105 bra 	$L__BB0_85;

	shr.u64 	%rd201, %rd540, 40;
	st.global.u8 	[%rd74+525], %rd201;

$L__BB0_85:
	add.s64 	%rd202, %rd34, 526;
	setp.lt.u64 	%p106, %rd202, %rd77;
	setp.ge.u64 	%p107, %rd202, %rd78;
	or.pred  	%p108, %p107, %p106;
	@%p108 bra 	$L__BB0_87;

	shr.u64 	%rd203, %rd540, 48;
	st.global.u8 	[%rd74+526], %rd203;

$L__BB0_87:
	add.s64 	%rd204, %rd34, 527;
	setp.lt.u64 	%p109, %rd204, %rd77;
	setp.ge.u64 	%p110, %rd204, %rd78;
	or.pred  	%p111, %p110, %p109;
	@%p111 bra 	$L__BB0_89;

	shr.u64 	%rd205, %rd540, 56;
	st.global.u8 	[%rd74+527], %rd205;

$L__BB0_89:
	@%p6 bra 	$L__BB0_122;

	add.s64 	%rd503, %rd34, 1024;
	max.u64 	%rd79, %rd503, %rd32;
	add.s64 	%rd206, %rd34, 1040;
	min.u64 	%rd80, %rd206, %rd33;
	setp.ge.u64 	%p113, %rd503, %rd80;
	setp.lt.u64 	%p114, %rd503, %rd32;
	or.pred  	%p115, %p113, %p114;
	@%p115 bra 	$L__BB0_92;

	st.global.u8 	[%rd74+1024], %rd543;

$L__BB0_92:
	add.s64 	%rd207, %rd34, 1025;
	setp.lt.u64 	%p116, %rd207, %rd79;
	setp.ge.u64 	%p117, %rd207, %rd80;
	or.pred  	%p118, %p117, %p116;
	@%p118 bra 	$L__BB0_94;

	shr.u64 	%rd208, %rd543, 8;
	st.global.u8 	[%rd74+1025], %rd208;

$L__BB0_94:
	add.s64 	%rd209, %rd34, 1026;
	setp.lt.u64 	%p119, %rd209, %rd79;
	setp.ge.u64 	%p120, %rd209, %rd80;
	or.pred  	%p121, %p120, %p119;
	@%p121 bra 	$L__BB0_96;

	shr.u64 	%rd210, %rd543, 16;
	st.global.u8 	[%rd74+1026], %rd210;

$L__BB0_96:
	add.s64 	%rd211, %rd34, 1027;
	setp.lt.u64 	%p122, %rd211, %rd79;
	setp.ge.u64 	%p123, %rd211, %rd80;
	or.pred  	%p124, %p123, %p122;
	@%p124 bra 	$L__BB0_98;

	shr.u64 	%rd212, %rd543, 24;
	st.global.u8 	[%rd74+1027], %rd212;

$L__BB0_98:
	add.s64 	%rd213, %rd34, 1028;
	setp.lt.u64 	%p125, %rd213, %rd79;
	setp.ge.u64 	%p126, %rd213, %rd80;
	or.pred  	%p127, %p126, %p125;
	@%p127 bra 	$L__BB0_100;

	shr.u64 	%rd214, %rd543, 32;
	st.global.u8 	[%rd74+1028], %rd214;

$L__BB0_100:
	add.s64 	%rd215, %rd34, 1029;
	setp.lt.u64 	%p128, %rd215, %rd79;
	setp.ge.u64 	%p129, %rd215, %rd80;
	or.pred  	%p130, %p129, %p128;
	@%p130 bra 	$L__BB0_102;

	shr.u64 	%rd216, %rd543, 40;
	st.global.u8 	[%rd74+1029], %rd216;

$L__BB0_102:
	add.s64 	%rd217, %rd34, 1030;
	setp.lt.u64 	%p131, %rd217, %rd79;
	setp.ge.u64 	%p132, %rd217, %rd80;
	or.pred  	%p133, %p132, %p131;
	@%p133 bra 	$L__BB0_104;

	shr.u64 	%rd218, %rd543, 48;
	st.global.u8 	[%rd74+1030], %rd218;

$L__BB0_104:
	add.s64 	%rd219, %rd34, 1031;
	setp.lt.u64 	%p134, %rd219, %rd79;
	setp.ge.u64 	%p135, %rd219, %rd80;
	or.pred  	%p136, %p135, %p134;
	@%p136 bra 	$L__BB0_106;

	shr.u64 	%rd220, %rd543, 56;
	st.global.u8 	[%rd74+1031], %rd220;

$L__BB0_106:
	add.s64 	%rd221, %rd34, 1032;
	setp.lt.u64 	%p137, %rd221, %rd79;
	setp.ge.u64 	%p138, %rd221, %rd80;
	or.pred  	%p139, %p138, %p137;
	@%p139 bra 	$L__BB0_108;

	st.global.u8 	[%rd74+1032], %rd542;

$L__BB0_108:
	add.s64 	%rd222, %rd34, 1033;
	setp.lt.u64 	%p140, %rd222, %rd79;
	setp.ge.u64 	%p141, %rd222, %rd80;
	or.pred  	%p142, %p141, %p140;
	@%p142 bra 	$L__BB0_110;

	shr.u64 	%rd223, %rd542, 8;
	st.global.u8 	[%rd74+1033], %rd223;

$L__BB0_110:
	add.s64 	%rd224, %rd34, 1034;
	setp.lt.u64 	%p143, %rd224, %rd79;
	setp.ge.u64 	%p144, %rd224, %rd80;
	or.pred  	%p145, %p144, %p143;
	@%p145 bra 	$L__BB0_112;

	shr.u64 	%rd225, %rd542, 16;
	st.global.u8 	[%rd74+1034], %rd225;

$L__BB0_112:
	add.s64 	%rd226, %rd34, 1035;
	setp.lt.u64 	%p146, %rd226, %rd79;
	setp.ge.u64 	%p147, %rd226, %rd80;
	or.pred  	%p148, %p147, %p146;
	@%p148 bra 	$L__BB0_114;

	shr.u64 	%rd227, %rd542, 24;
	st.global.u8 	[%rd74+1035], %rd227;

$L__BB0_114:
	add.s64 	%rd228, %rd34, 1036;
	setp.lt.u64 	%p149, %rd228, %rd79;
	setp.ge.u64 	%p150, %rd228, %rd80;
	or.pred  	%p151, %p150, %p149;
	@%p151 bra 	$L__BB0_116;

	shr.u64 	%rd229, %rd542, 32;
	st.global.u8 	[%rd74+1036], %rd229;

$L__BB0_116:
	add.s64 	%rd230, %rd34, 1037;
	setp.lt.u64 	%p152, %rd230, %rd79;
	setp.ge.u64 	%p153, %rd230, %rd80;
	or.pred  	%p154, %p153, %p152;
	@%p154 bra 	$L__BB0_118;

	shr.u64 	%rd231, %rd542, 40;
	st.global.u8 	[%rd74+1037], %rd231;

$L__BB0_118:
	add.s64 	%rd232, %rd34, 1038;
	setp.lt.u64 	%p155, %rd232, %rd79;
	setp.ge.u64 	%p156, %rd232, %rd80;
	or.pred  	%p157, %p156, %p155;
	@%p157 bra 	$L__BB0_120;

	shr.u64 	%rd233, %rd542, 48;
	st.global.u8 	[%rd74+1038], %rd233;

$L__BB0_120:
	add.s64 	%rd234, %rd34, 1039;
	setp.lt.u64 	%p158, %rd234, %rd79;
	setp.ge.u64 	%p159, %rd234, %rd80;
	or.pred  	%p160, %p159, %p158;
	@%p160 bra 	$L__BB0_122;

	shr.u64 	%rd235, %rd542, 56;
	st.global.u8 	[%rd74+1039], %rd235;

$L__BB0_122:
	@%p7 bra 	$L__BB0_155;

	add.s64 	%rd502, %rd34, 1536;
	max.u64 	%rd81, %rd502, %rd32;
	add.s64 	%rd236, %rd34, 1552;
	min.u64 	%rd82, %rd236, %rd33;
	setp.ge.u64 	%p162, %rd502, %rd82;
	setp.lt.u64 	%p163, %rd502, %rd32;
	or.pred  	%p164, %p162, %p163;
	@%p164 bra 	$L__BB0_125;

	st.global.u8 	[%rd74+1536], %rd545;

$L__BB0_125:
	add.s64 	%rd237, %rd34, 1537;
	setp.lt.u64 	%p165, %rd237, %rd81;
	setp.ge.u64 	%p166, %rd237, %rd82;
	or.pred  	%p167, %p166, %p165;
	@%p167 bra 	$L__BB0_127;

	shr.u64 	%rd238, %rd545, 8;
	st.global.u8 	[%rd74+1537], %rd238;

$L__BB0_127:
	add.s64 	%rd239, %rd34, 1538;
	setp.lt.u64 	%p168, %rd239, %rd81;
	setp.ge.u64 	%p169, %rd239, %rd82;
	or.pred  	%p170, %p169, %p168;
	@%p170 bra 	$L__BB0_129;

	shr.u64 	%rd240, %rd545, 16;
	st.global.u8 	[%rd74+1538], %rd240;

$L__BB0_129:
	add.s64 	%rd241, %rd34, 1539;
	setp.lt.u64 	%p171, %rd241, %rd81;
	setp.ge.u64 	%p172, %rd241, %rd82;
	or.pred  	%p173, %p172, %p171;
	@%p173 bra 	$L__BB0_131;

	shr.u64 	%rd242, %rd545, 24;
	st.global.u8 	[%rd74+1539], %rd242;

$L__BB0_131:
	add.s64 	%rd243, %rd34, 1540;
	setp.lt.u64 	%p174, %rd243, %rd81;
	setp.ge.u64 	%p175, %rd243, %rd82;
	or.pred  	%p176, %p175, %p174;
	@%p176 bra 	$L__BB0_133;

	shr.u64 	%rd244, %rd545, 32;
	st.global.u8 	[%rd74+1540], %rd244;

$L__BB0_133:
	add.s64 	%rd245, %rd34, 1541;
	setp.lt.u64 	%p177, %rd245, %rd81;
	setp.ge.u64 	%p178, %rd245, %rd82;
	or.pred  	%p179, %p178, %p177;
	@%p179 bra 	$L__BB0_135;

	shr.u64 	%rd246, %rd545, 40;
	st.global.u8 	[%rd74+1541], %rd246;

$L__BB0_135:
	add.s64 	%rd247, %rd34, 1542;
	setp.lt.u64 	%p180, %rd247, %rd81;
	setp.ge.u64 	%p181, %rd247, %rd82;
	or.pred  	%p182, %p181, %p180;
	@%p182 bra 	$L__BB0_137;

	shr.u64 	%rd248, %rd545, 48;
	st.global.u8 	[%rd74+1542], %rd248;

$L__BB0_137:
	add.s64 	%rd249, %rd34, 1543;
	setp.lt.u64 	%p183, %rd249, %rd81;
	setp.ge.u64 	%p184, %rd249, %rd82;
	or.pred  	%p185, %p184, %p183;
	@%p185 bra 	$L__BB0_139;

	shr.u64 	%rd250, %rd545, 56;
	st.global.u8 	[%rd74+1543], %rd250;

$L__BB0_139:
	add.s64 	%rd251, %rd34, 1544;
	setp.lt.u64 	%p186, %rd251, %rd81;
	setp.ge.u64 	%p187, %rd251, %rd82;
	or.pred  	%p188, %p187, %p186;
	@%p188 bra 	$L__BB0_141;

	st.global.u8 	[%rd74+1544], %rd544;

$L__BB0_141:
	add.s64 	%rd252, %rd34, 1545;
	setp.lt.u64 	%p189, %rd252, %rd81;
	setp.ge.u64 	%p190, %rd252, %rd82;
	or.pred  	%p191, %p190, %p189;
	@%p191 bra 	$L__BB0_143;

	shr.u64 	%rd253, %rd544, 8;
	st.global.u8 	[%rd74+1545], %rd253;

$L__BB0_143:
	add.s64 	%rd254, %rd34, 1546;
	setp.lt.u64 	%p192, %rd254, %rd81;
	setp.ge.u64 	%p193, %rd254, %rd82;
	or.pred  	%p194, %p193, %p192;
	@%p194 bra 	$L__BB0_145;

	shr.u64 	%rd255, %rd544, 16;
	st.global.u8 	[%rd74+1546], %rd255;

$L__BB0_145:
	add.s64 	%rd256, %rd34, 1547;
	setp.lt.u64 	%p195, %rd256, %rd81;
	setp.ge.u64 	%p196, %rd256, %rd82;
	or.pred  	%p197, %p196, %p195;
	@%p197 bra 	$L__BB0_147;

	shr.u64 	%rd257, %rd544, 24;
	st.global.u8 	[%rd74+1547], %rd257;

$L__BB0_147:
	add.s64 	%rd258, %rd34, 1548;
	setp.lt.u64 	%p198, %rd258, %rd81;
	setp.ge.u64 	%p199, %rd258, %rd82;
	or.pred  	%p200, %p199, %p198;
	@%p200 bra 	$L__BB0_149;

	shr.u64 	%rd259, %rd544, 32;
	st.global.u8 	[%rd74+1548], %rd259;

$L__BB0_149:
	add.s64 	%rd260, %rd34, 1549;
	setp.lt.u64 	%p201, %rd260, %rd81;
	setp.ge.u64 	%p202, %rd260, %rd82;
	or.pred  	%p203, %p202, %p201;
	@%p203 bra 	$L__BB0_151;

	shr.u64 	%rd261, %rd544, 40;
	st.global.u8 	[%rd74+1549], %rd261;

$L__BB0_151:
	add.s64 	%rd262, %rd34, 1550;
	setp.lt.u64 	%p204, %rd262, %rd81;
	setp.ge.u64 	%p205, %rd262, %rd82;
	or.pred  	%p206, %p205, %p204;
	@%p206 bra 	$L__BB0_153;

	shr.u64 	%rd263, %rd544, 48;
	st.global.u8 	[%rd74+1550], %rd263;

$L__BB0_153:
	add.s64 	%rd264, %rd34, 1551;
	setp.lt.u64 	%p207, %rd264, %rd81;
	setp.ge.u64 	%p208, %rd264, %rd82;
	or.pred  	%p209, %p208, %p207;
	@%p209 bra 	$L__BB0_155;

	shr.u64 	%rd265, %rd544, 56;
	st.global.u8 	[%rd74+1551], %rd265;

$L__BB0_155:
	@%p8 bra 	$L__BB0_188;

	add.s64 	%rd501, %rd34, 2048;
	max.u64 	%rd83, %rd501, %rd32;
	add.s64 	%rd266, %rd34, 2064;
	min.u64 	%rd84, %rd266, %rd33;
	setp.ge.u64 	%p211, %rd501, %rd84;
	setp.lt.u64 	%p212, %rd501, %rd32;
	or.pred  	%p213, %p211, %p212;
	@%p213 bra 	$L__BB0_158;

	st.global.u8 	[%rd74+2048], %rd547;

$L__BB0_158:
	add.s64 	%rd267, %rd34, 2049;
	setp.lt.u64 	%p214, %rd267, %rd83;
	setp.ge.u64 	%p215, %rd267, %rd84;
	or.pred  	%p216, %p215, %p214;
	@%p216 bra 	$L__BB0_160;

	shr.u64 	%rd268, %rd547, 8;
	st.global.u8 	[%rd74+2049], %rd268;

$L__BB0_160:
	add.s64 	%rd269, %rd34, 2050;
	setp.lt.u64 	%p217, %rd269, %rd83;
	setp.ge.u64 	%p218, %rd269, %rd84;
	or.pred  	%p219, %p218, %p217;
	@%p219 bra 	$L__BB0_162;

	shr.u64 	%rd270, %rd547, 16;
	st.global.u8 	[%rd74+2050], %rd270;

$L__BB0_162:
	add.s64 	%rd271, %rd34, 2051;
	setp.lt.u64 	%p220, %rd271, %rd83;
	setp.ge.u64 	%p221, %rd271, %rd84;
	or.pred  	%p222, %p221, %p220;
	@%p222 bra 	$L__BB0_164;

	shr.u64 	%rd272, %rd547, 24;
	st.global.u8 	[%rd74+2051], %rd272;

$L__BB0_164:
	add.s64 	%rd273, %rd34, 2052;
	setp.lt.u64 	%p223, %rd273, %rd83;
	setp.ge.u64 	%p224, %rd273, %rd84;
	or.pred  	%p225, %p224, %p223;
	@%p225 bra 	$L__BB0_166;

	shr.u64 	%rd274, %rd547, 32;
	st.global.u8 	[%rd74+2052], %rd274;

$L__BB0_166:
	add.s64 	%rd275, %rd34, 2053;
	setp.lt.u64 	%p226, %rd275, %rd83;
	setp.ge.u64 	%p227, %rd275, %rd84;
	or.pred  	%p228, %p227, %p226;
	@%p228 bra 	$L__BB0_168;

	shr.u64 	%rd276, %rd547, 40;
	st.global.u8 	[%rd74+2053], %rd276;

$L__BB0_168:
	add.s64 	%rd277, %rd34, 2054;
	setp.lt.u64 	%p229, %rd277, %rd83;
	setp.ge.u64 	%p230, %rd277, %rd84;
	or.pred  	%p231, %p230, %p229;
	@%p231 bra 	$L__BB0_170;

	shr.u64 	%rd278, %rd547, 48;
	st.global.u8 	[%rd74+2054], %rd278;

$L__BB0_170:
	add.s64 	%rd279, %rd34, 2055;
	setp.lt.u64 	%p232, %rd279, %rd83;
	setp.ge.u64 	%p233, %rd279, %rd84;
	or.pred  	%p234, %p233, %p232;
	@%p234 bra 	$L__BB0_172;

	shr.u64 	%rd280, %rd547, 56;
	st.global.u8 	[%rd74+2055], %rd280;

$L__BB0_172:
	add.s64 	%rd281, %rd34, 2056;
	setp.lt.u64 	%p235, %rd281, %rd83;
	setp.ge.u64 	%p236, %rd281, %rd84;
	or.pred  	%p237, %p236, %p235;
	@%p237 bra 	$L__BB0_174;

	st.global.u8 	[%rd74+2056], %rd546;

$L__BB0_174:
	add.s64 	%rd282, %rd34, 2057;
	setp.lt.u64 	%p238, %rd282, %rd83;
	setp.ge.u64 	%p239, %rd282, %rd84;
	or.pred  	%p240, %p239, %p238;
	@%p240 bra 	$L__BB0_176;

	shr.u64 	%rd283, %rd546, 8;
	st.global.u8 	[%rd74+2057], %rd283;

$L__BB0_176:
	add.s64 	%rd284, %rd34, 2058;
	setp.lt.u64 	%p241, %rd284, %rd83;
	setp.ge.u64 	%p242, %rd284, %rd84;
	or.pred  	%p243, %p242, %p241;
	@%p243 bra 	$L__BB0_178;

	shr.u64 	%rd285, %rd546, 16;
	st.global.u8 	[%rd74+2058], %rd285;

$L__BB0_178:
	add.s64 	%rd286, %rd34, 2059;
	setp.lt.u64 	%p244, %rd286, %rd83;
	setp.ge.u64 	%p245, %rd286, %rd84;
	or.pred  	%p246, %p245, %p244;
	@%p246 bra 	$L__BB0_180;

	shr.u64 	%rd287, %rd546, 24;
	st.global.u8 	[%rd74+2059], %rd287;

$L__BB0_180:
	add.s64 	%rd288, %rd34, 2060;
	setp.lt.u64 	%p247, %rd288, %rd83;
	setp.ge.u64 	%p248, %rd288, %rd84;
	or.pred  	%p249, %p248, %p247;
	@%p249 bra 	$L__BB0_182;

	shr.u64 	%rd289, %rd546, 32;
	st.global.u8 	[%rd74+2060], %rd289;

$L__BB0_182:
	add.s64 	%rd290, %rd34, 2061;
	setp.lt.u64 	%p250, %rd290, %rd83;
	setp.ge.u64 	%p251, %rd290, %rd84;
	or.pred  	%p252, %p251, %p250;
	@%p252 bra 	$L__BB0_184;

	shr.u64 	%rd291, %rd546, 40;
	st.global.u8 	[%rd74+2061], %rd291;

$L__BB0_184:
	add.s64 	%rd292, %rd34, 2062;
	setp.lt.u64 	%p253, %rd292, %rd83;
	setp.ge.u64 	%p254, %rd292, %rd84;
	or.pred  	%p255, %p254, %p253;
	@%p255 bra 	$L__BB0_186;

	shr.u64 	%rd293, %rd546, 48;
	st.global.u8 	[%rd74+2062], %rd293;

$L__BB0_186:
	add.s64 	%rd294, %rd34, 2063;
	setp.lt.u64 	%p256, %rd294, %rd83;
	setp.ge.u64 	%p257, %rd294, %rd84;
	or.pred  	%p258, %p257, %p256;
	@%p258 bra 	$L__BB0_188;

	shr.u64 	%rd295, %rd546, 56;
	st.global.u8 	[%rd74+2063], %rd295;

$L__BB0_188:
	@%p9 bra 	$L__BB0_221;

	add.s64 	%rd500, %rd34, 2560;
	max.u64 	%rd85, %rd500, %rd32;
	add.s64 	%rd296, %rd34, 2576;
	min.u64 	%rd86, %rd296, %rd33;
	setp.ge.u64 	%p260, %rd500, %rd86;
	setp.lt.u64 	%p261, %rd500, %rd32;
	or.pred  	%p262, %p260, %p261;
	@%p262 bra 	$L__BB0_191;

	st.global.u8 	[%rd74+2560], %rd549;

$L__BB0_191:
	add.s64 	%rd297, %rd34, 2561;
	setp.lt.u64 	%p263, %rd297, %rd85;
	setp.ge.u64 	%p264, %rd297, %rd86;
	or.pred  	%p265, %p264, %p263;
	@%p265 bra 	$L__BB0_193;

	shr.u64 	%rd298, %rd549, 8;
	st.global.u8 	[%rd74+2561], %rd298;

$L__BB0_193:
	add.s64 	%rd299, %rd34, 2562;
	setp.lt.u64 	%p266, %rd299, %rd85;
	setp.ge.u64 	%p267, %rd299, %rd86;
	or.pred  	%p268, %p267, %p266;
	@%p268 bra 	$L__BB0_195;

	shr.u64 	%rd300, %rd549, 16;
	st.global.u8 	[%rd74+2562], %rd300;

$L__BB0_195:
	add.s64 	%rd301, %rd34, 2563;
	setp.lt.u64 	%p269, %rd301, %rd85;
	setp.ge.u64 	%p270, %rd301, %rd86;
	or.pred  	%p271, %p270, %p269;
	@%p271 bra 	$L__BB0_197;

	shr.u64 	%rd302, %rd549, 24;
	st.global.u8 	[%rd74+2563], %rd302;

$L__BB0_197:
	add.s64 	%rd303, %rd34, 2564;
	setp.lt.u64 	%p272, %rd303, %rd85;
	setp.ge.u64 	%p273, %rd303, %rd86;
	or.pred  	%p274, %p273, %p272;
	@%p274 bra 	$L__BB0_199;

	shr.u64 	%rd304, %rd549, 32;
	st.global.u8 	[%rd74+2564], %rd304;

$L__BB0_199:
	add.s64 	%rd305, %rd34, 2565;
	setp.lt.u64 	%p275, %rd305, %rd85;
	setp.ge.u64 	%p276, %rd305, %rd86;
	or.pred  	%p277, %p276, %p275;
	@%p277 bra 	$L__BB0_201;

	shr.u64 	%rd306, %rd549, 40;
	st.global.u8 	[%rd74+2565], %rd306;

$L__BB0_201:
	add.s64 	%rd307, %rd34, 2566;
	setp.lt.u64 	%p278, %rd307, %rd85;
	setp.ge.u64 	%p279, %rd307, %rd86;
	or.pred  	%p280, %p279, %p278;
	@%p280 bra 	$L__BB0_203;

	shr.u64 	%rd308, %rd549, 48;
	st.global.u8 	[%rd74+2566], %rd308;

$L__BB0_203:
	add.s64 	%rd309, %rd34, 2567;
	setp.lt.u64 	%p281, %rd309, %rd85;
	setp.ge.u64 	%p282, %rd309, %rd86;
	or.pred  	%p283, %p282, %p281;
	@%p283 bra 	$L__BB0_205;

	shr.u64 	%rd310, %rd549, 56;
	st.global.u8 	[%rd74+2567], %rd310;

$L__BB0_205:
	add.s64 	%rd311, %rd34, 2568;
	setp.lt.u64 	%p284, %rd311, %rd85;
	setp.ge.u64 	%p285, %rd311, %rd86;
	or.pred  	%p286, %p285, %p284;
	@%p286 bra 	$L__BB0_207;

	st.global.u8 	[%rd74+2568], %rd548;

$L__BB0_207:
	add.s64 	%rd312, %rd34, 2569;
	setp.lt.u64 	%p287, %rd312, %rd85;
	setp.ge.u64 	%p288, %rd312, %rd86;
	or.pred  	%p289, %p288, %p287;
	@%p289 bra 	$L__BB0_209;

	shr.u64 	%rd313, %rd548, 8;
	st.global.u8 	[%rd74+2569], %rd313;

$L__BB0_209:
	add.s64 	%rd314, %rd34, 2570;
	setp.lt.u64 	%p290, %rd314, %rd85;
	setp.ge.u64 	%p291, %rd314, %rd86;
	or.pred  	%p292, %p291, %p290;
	@%p292 bra 	$L__BB0_211;

	shr.u64 	%rd315, %rd548, 16;
	st.global.u8 	[%rd74+2570], %rd315;

$L__BB0_211:
	add.s64 	%rd316, %rd34, 2571;
	setp.lt.u64 	%p293, %rd316, %rd85;
	setp.ge.u64 	%p294, %rd316, %rd86;
	or.pred  	%p295, %p294, %p293;
	@%p295 bra 	$L__BB0_213;

	shr.u64 	%rd317, %rd548, 24;
	st.global.u8 	[%rd74+2571], %rd317;

$L__BB0_213:
	add.s64 	%rd318, %rd34, 2572;
	setp.lt.u64 	%p296, %rd318, %rd85;
	setp.ge.u64 	%p297, %rd318, %rd86;
	or.pred  	%p298, %p297, %p296;
	@%p298 bra 	$L__BB0_215;

	shr.u64 	%rd319, %rd548, 32;
	st.global.u8 	[%rd74+2572], %rd319;

$L__BB0_215:
	add.s64 	%rd320, %rd34, 2573;
	setp.lt.u64 	%p299, %rd320, %rd85;
	setp.ge.u64 	%p300, %rd320, %rd86;
	or.pred  	%p301, %p300, %p299;
	@%p301 bra 	$L__BB0_217;

	shr.u64 	%rd321, %rd548, 40;
	st.global.u8 	[%rd74+2573], %rd321;

$L__BB0_217:
	add.s64 	%rd322, %rd34, 2574;
	setp.lt.u64 	%p302, %rd322, %rd85;
	setp.ge.u64 	%p303, %rd322, %rd86;
	or.pred  	%p304, %p303, %p302;
	@%p304 bra 	$L__BB0_219;

	shr.u64 	%rd323, %rd548, 48;
	st.global.u8 	[%rd74+2574], %rd323;

$L__BB0_219:
	add.s64 	%rd324, %rd34, 2575;
	setp.lt.u64 	%p305, %rd324, %rd85;
	setp.ge.u64 	%p306, %rd324, %rd86;
	or.pred  	%p307, %p306, %p305;
	@%p307 bra 	$L__BB0_221;

	shr.u64 	%rd325, %rd548, 56;
	st.global.u8 	[%rd74+2575], %rd325;

$L__BB0_221:
	@%p10 bra 	$L__BB0_254;

	add.s64 	%rd499, %rd34, 3072;
	max.u64 	%rd87, %rd499, %rd32;
	add.s64 	%rd326, %rd34, 3088;
	min.u64 	%rd88, %rd326, %rd33;
	setp.ge.u64 	%p309, %rd499, %rd88;
	setp.lt.u64 	%p310, %rd499, %rd32;
	or.pred  	%p311, %p309, %p310;
	@%p311 bra 	$L__BB0_224;

	st.global.u8 	[%rd74+3072], %rd551;

$L__BB0_224:
	add.s64 	%rd327, %rd34, 3073;
	setp.lt.u64 	%p312, %rd327, %rd87;
	setp.ge.u64 	%p313, %rd327, %rd88;
	or.pred  	%p314, %p313, %p312;
	@%p314 bra 	$L__BB0_226;

	shr.u64 	%rd328, %rd551, 8;
	st.global.u8 	[%rd74+3073], %rd328;

$L__BB0_226:
	add.s64 	%rd329, %rd34, 3074;
	setp.lt.u64 	%p315, %rd329, %rd87;
	setp.ge.u64 	%p316, %rd329, %rd88;
	or.pred  	%p317, %p316, %p315;
	@%p317 bra 	$L__BB0_228;

	shr.u64 	%rd330, %rd551, 16;
	st.global.u8 	[%rd74+3074], %rd330;

$L__BB0_228:
	add.s64 	%rd331, %rd34, 3075;
	setp.lt.u64 	%p318, %rd331, %rd87;
	setp.ge.u64 	%p319, %rd331, %rd88;
	or.pred  	%p320, %p319, %p318;
	@%p320 bra 	$L__BB0_230;

	shr.u64 	%rd332, %rd551, 24;
	st.global.u8 	[%rd74+3075], %rd332;

$L__BB0_230:
	add.s64 	%rd333, %rd34, 3076;
	setp.lt.u64 	%p321, %rd333, %rd87;
	setp.ge.u64 	%p322, %rd333, %rd88;
	or.pred  	%p323, %p322, %p321;
	@%p323 bra 	$L__BB0_232;

	shr.u64 	%rd334, %rd551, 32;
	st.global.u8 	[%rd74+3076], %rd334;

$L__BB0_232:
	add.s64 	%rd335, %rd34, 3077;
	setp.lt.u64 	%p324, %rd335, %rd87;
	setp.ge.u64 	%p325, %rd335, %rd88;
	or.pred  	%p326, %p325, %p324;
	@%p326 bra 	$L__BB0_234;

	shr.u64 	%rd336, %rd551, 40;
	st.global.u8 	[%rd74+3077], %rd336;

$L__BB0_234:
	add.s64 	%rd337, %rd34, 3078;
	setp.lt.u64 	%p327, %rd337, %rd87;
	setp.ge.u64 	%p328, %rd337, %rd88;
	or.pred  	%p329, %p328, %p327;
	@%p329 bra 	$L__BB0_236;

	shr.u64 	%rd338, %rd551, 48;
	st.global.u8 	[%rd74+3078], %rd338;

$L__BB0_236:
	add.s64 	%rd339, %rd34, 3079;
	setp.lt.u64 	%p330, %rd339, %rd87;
	setp.ge.u64 	%p331, %rd339, %rd88;
	or.pred  	%p332, %p331, %p330;
	@%p332 bra 	$L__BB0_238;

	shr.u64 	%rd340, %rd551, 56;
	st.global.u8 	[%rd74+3079], %rd340;

$L__BB0_238:
	add.s64 	%rd341, %rd34, 3080;
	setp.lt.u64 	%p333, %rd341, %rd87;
	setp.ge.u64 	%p334, %rd341, %rd88;
	or.pred  	%p335, %p334, %p333;
	@%p335 bra 	$L__BB0_240;

	st.global.u8 	[%rd74+3080], %rd550;

$L__BB0_240:
	add.s64 	%rd342, %rd34, 3081;
	setp.lt.u64 	%p336, %rd342, %rd87;
	setp.ge.u64 	%p337, %rd342, %rd88;
	or.pred  	%p338, %p337, %p336;
	@%p338 bra 	$L__BB0_242;

	shr.u64 	%rd343, %rd550, 8;
	st.global.u8 	[%rd74+3081], %rd343;

$L__BB0_242:
	add.s64 	%rd344, %rd34, 3082;
	setp.lt.u64 	%p339, %rd344, %rd87;
	setp.ge.u64 	%p340, %rd344, %rd88;
	or.pred  	%p341, %p340, %p339;
	@%p341 bra 	$L__BB0_244;

	shr.u64 	%rd345, %rd550, 16;
	st.global.u8 	[%rd74+3082], %rd345;

$L__BB0_244:
	add.s64 	%rd346, %rd34, 3083;
	setp.lt.u64 	%p342, %rd346, %rd87;
	setp.ge.u64 	%p343, %rd346, %rd88;
	or.pred  	%p344, %p343, %p342;
	@%p344 bra 	$L__BB0_246;

	shr.u64 	%rd347, %rd550, 24;
	st.global.u8 	[%rd74+3083], %rd347;

$L__BB0_246:
	add.s64 	%rd348, %rd34, 3084;
	setp.lt.u64 	%p345, %rd348, %rd87;
	setp.ge.u64 	%p346, %rd348, %rd88;
	or.pred  	%p347, %p346, %p345;
	@%p347 bra 	$L__BB0_248;

	shr.u64 	%rd349, %rd550, 32;
	st.global.u8 	[%rd74+3084], %rd349;

$L__BB0_248:
	add.s64 	%rd350, %rd34, 3085;
	setp.lt.u64 	%p348, %rd350, %rd87;
	setp.ge.u64 	%p349, %rd350, %rd88;
	or.pred  	%p350, %p349, %p348;
	@%p350 bra 	$L__BB0_250;

	shr.u64 	%rd351, %rd550, 40;
	st.global.u8 	[%rd74+3085], %rd351;

$L__BB0_250:
	add.s64 	%rd352, %rd34, 3086;
	setp.lt.u64 	%p351, %rd352, %rd87;
	setp.ge.u64 	%p352, %rd352, %rd88;
	or.pred  	%p353, %p352, %p351;
	@%p353 bra 	$L__BB0_252;

	shr.u64 	%rd353, %rd550, 48;
	st.global.u8 	[%rd74+3086], %rd353;

$L__BB0_252:
	add.s64 	%rd354, %rd34, 3087;
	setp.lt.u64 	%p354, %rd354, %rd87;
	setp.ge.u64 	%p355, %rd354, %rd88;
	or.pred  	%p356, %p355, %p354;
	@%p356 bra 	$L__BB0_254;

	shr.u64 	%rd355, %rd550, 56;
	st.global.u8 	[%rd74+3087], %rd355;

$L__BB0_254:
	@%p11 bra 	$L__BB0_439;

	add.s64 	%rd498, %rd34, 3584;
	max.u64 	%rd89, %rd498, %rd32;
	add.s64 	%rd356, %rd34, 3600;
	min.u64 	%rd90, %rd356, %rd33;
	setp.ge.u64 	%p358, %rd498, %rd90;
	setp.lt.u64 	%p359, %rd498, %rd32;
	or.pred  	%p360, %p358, %p359;
	@%p360 bra 	$L__BB0_257;

	st.global.u8 	[%rd74+3584], %rd553;

$L__BB0_257:
	add.s64 	%rd357, %rd34, 3585;
	setp.lt.u64 	%p361, %rd357, %rd89;
	setp.ge.u64 	%p362, %rd357, %rd90;
	or.pred  	%p363, %p362, %p361;
	@%p363 bra 	$L__BB0_259;

	shr.u64 	%rd358, %rd553, 8;
	st.global.u8 	[%rd74+3585], %rd358;

$L__BB0_259:
	add.s64 	%rd359, %rd34, 3586;
	setp.lt.u64 	%p364, %rd359, %rd89;
	setp.ge.u64 	%p365, %rd359, %rd90;
	or.pred  	%p366, %p365, %p364;
	@%p366 bra 	$L__BB0_261;

	shr.u64 	%rd360, %rd553, 16;
	st.global.u8 	[%rd74+3586], %rd360;

$L__BB0_261:
	add.s64 	%rd361, %rd34, 3587;
	setp.lt.u64 	%p367, %rd361, %rd89;
	setp.ge.u64 	%p368, %rd361, %rd90;
	or.pred  	%p369, %p368, %p367;
	@%p369 bra 	$L__BB0_263;

	shr.u64 	%rd362, %rd553, 24;
	st.global.u8 	[%rd74+3587], %rd362;

$L__BB0_263:
	add.s64 	%rd363, %rd34, 3588;
	setp.lt.u64 	%p370, %rd363, %rd89;
	setp.ge.u64 	%p371, %rd363, %rd90;
	or.pred  	%p372, %p371, %p370;
	@%p372 bra 	$L__BB0_265;

	shr.u64 	%rd364, %rd553, 32;
	st.global.u8 	[%rd74+3588], %rd364;

$L__BB0_265:
	add.s64 	%rd365, %rd34, 3589;
	setp.lt.u64 	%p373, %rd365, %rd89;
	setp.ge.u64 	%p374, %rd365, %rd90;
	or.pred  	%p375, %p374, %p373;
	@%p375 bra 	$L__BB0_267;

	shr.u64 	%rd366, %rd553, 40;
	st.global.u8 	[%rd74+3589], %rd366;

$L__BB0_267:
	add.s64 	%rd367, %rd34, 3590;
	setp.lt.u64 	%p376, %rd367, %rd89;
	setp.ge.u64 	%p377, %rd367, %rd90;
	or.pred  	%p378, %p377, %p376;
	@%p378 bra 	$L__BB0_269;

	shr.u64 	%rd368, %rd553, 48;
	st.global.u8 	[%rd74+3590], %rd368;

$L__BB0_269:
	add.s64 	%rd369, %rd34, 3591;
	setp.lt.u64 	%p379, %rd369, %rd89;
	setp.ge.u64 	%p380, %rd369, %rd90;
	or.pred  	%p381, %p380, %p379;
	@%p381 bra 	$L__BB0_271;

	shr.u64 	%rd370, %rd553, 56;
	st.global.u8 	[%rd74+3591], %rd370;

$L__BB0_271:
	add.s64 	%rd371, %rd34, 3592;
	setp.lt.u64 	%p382, %rd371, %rd89;
	setp.ge.u64 	%p383, %rd371, %rd90;
	or.pred  	%p384, %p383, %p382;
	@%p384 bra 	$L__BB0_273;

	st.global.u8 	[%rd74+3592], %rd552;

$L__BB0_273:
	add.s64 	%rd372, %rd34, 3593;
	setp.lt.u64 	%p385, %rd372, %rd89;
	setp.ge.u64 	%p386, %rd372, %rd90;
	or.pred  	%p387, %p386, %p385;
	@%p387 bra 	$L__BB0_275;

	shr.u64 	%rd373, %rd552, 8;
	st.global.u8 	[%rd74+3593], %rd373;

$L__BB0_275:
	add.s64 	%rd374, %rd34, 3594;
	setp.lt.u64 	%p388, %rd374, %rd89;
	setp.ge.u64 	%p389, %rd374, %rd90;
	or.pred  	%p390, %p389, %p388;
	@%p390 bra 	$L__BB0_277;

	shr.u64 	%rd375, %rd552, 16;
	st.global.u8 	[%rd74+3594], %rd375;

$L__BB0_277:
	add.s64 	%rd376, %rd34, 3595;
	setp.lt.u64 	%p391, %rd376, %rd89;
	setp.ge.u64 	%p392, %rd376, %rd90;
	or.pred  	%p393, %p392, %p391;
	@%p393 bra 	$L__BB0_279;

	shr.u64 	%rd377, %rd552, 24;
	st.global.u8 	[%rd74+3595], %rd377;

$L__BB0_279:
	add.s64 	%rd378, %rd34, 3596;
	setp.lt.u64 	%p394, %rd378, %rd89;
	setp.ge.u64 	%p395, %rd378, %rd90;
	or.pred  	%p396, %p395, %p394;
	@%p396 bra 	$L__BB0_281;

	shr.u64 	%rd379, %rd552, 32;
	st.global.u8 	[%rd74+3596], %rd379;

$L__BB0_281:
	add.s64 	%rd380, %rd34, 3597;
	setp.lt.u64 	%p397, %rd380, %rd89;
	setp.ge.u64 	%p398, %rd380, %rd90;
	or.pred  	%p399, %p398, %p397;
	@%p399 bra 	$L__BB0_283;

	shr.u64 	%rd381, %rd552, 40;
	st.global.u8 	[%rd74+3597], %rd381;

$L__BB0_283:
	add.s64 	%rd382, %rd34, 3598;
	setp.lt.u64 	%p400, %rd382, %rd89;
	setp.ge.u64 	%p401, %rd382, %rd90;
	or.pred  	%p402, %p401, %p400;
	@%p402 bra 	$L__BB0_285;

	shr.u64 	%rd383, %rd552, 48;
	st.global.u8 	[%rd74+3598], %rd383;

$L__BB0_285:
	add.s64 	%rd384, %rd34, 3599;
	setp.lt.u64 	%p403, %rd384, %rd89;
	setp.ge.u64 	%p404, %rd384, %rd90;
	or.pred  	%p405, %p404, %p403;
	@%p405 bra 	$L__BB0_439;

	shr.u64 	%rd385, %rd552, 56;
	st.global.u8 	[%rd74+3599], %rd385;

$L__BB0_439:
	add.s64 	%rd535, %rd535, %rd6;
	setp.lt.u64 	%p614, %rd535, %rd4;
	@%p614 bra 	$L__BB0_2;

$L__BB0_440:
	ret;

}
)ptx";
// clang-format on

}  // namespace gdsdata
